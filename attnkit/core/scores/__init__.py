"""Scores: how well a query matches a key."""

from attnkit.core.scores.additive import Additive
from attnkit.core.scores.kinds import (
    SCORES,
    Cosine,
    Dot,
    Gaussian,
    General,
    ScaledDot,
    Score,
    as_score,
)
from attnkit.core.scores.learned import AdditiveScore, CosineScore, GaussianScore, GeneralScore

__all__ = [
    "SCORES",
    "Additive",
    "AdditiveScore",
    "Cosine",
    "CosineScore",
    "Dot",
    "Gaussian",
    "GaussianScore",
    "General",
    "GeneralScore",
    "ScaledDot",
    "Score",
    "as_score",
]
