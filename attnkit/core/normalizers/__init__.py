"""Normalizers: how the scores of a query become the weights of its keys."""

from attnkit.core.inputs import Normalizer
from attnkit.core.normalizers.kinds import (
    NORMALIZERS,
    DeltaRule,
    Hard,
    Linear,
    Softmax,
    as_normalizer,
    masked_scores,
    softmax,
)
from attnkit.core.normalizers.learned import LearnedDeltaRule

__all__ = [
    "NORMALIZERS",
    "DeltaRule",
    "Hard",
    "LearnedDeltaRule",
    "Linear",
    "Normalizer",
    "Softmax",
    "as_normalizer",
    "masked_scores",
    "softmax",
]
