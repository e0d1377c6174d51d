"""Scores: how well a query matches a key."""

from attnkit.core.scores.base import Score
from attnkit.core.scores.kinds import (
    SCORES,
    Additive,
    Cosine,
    Gaussian,
    General,
    ScaledDot,
    as_score,
)

__all__ = [
    "SCORES",
    "Additive",
    "Cosine",
    "Gaussian",
    "General",
    "ScaledDot",
    "Score",
    "as_score",
]
