"""Explanations of a model's answers, and measures of how far to trust them."""

from attnkit.interpret.explain import explain
from attnkit.interpret.explanation import Explanation
from attnkit.interpret.methods.table import METHODS

__all__ = ["METHODS", "Explanation", "explain"]
