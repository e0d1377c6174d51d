"""Scores: how well a query matches a key."""

from attnkit.core.scores.base import Score
from attnkit.core.scores.kinds import (
    SCORES,
    Additive,
    Cosine,
    Dot,
    Gaussian,
    General,
    ScaledDot,
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
