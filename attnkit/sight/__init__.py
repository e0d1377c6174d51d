"""Sight: what a model's answer depends on, and how far to trust a map of it."""

from attnkit.sight.explain import explain
from attnkit.sight.explanation import Explanation
from attnkit.sight.methods.table import METHODS

__all__ = ["METHODS", "Explanation", "explain"]
