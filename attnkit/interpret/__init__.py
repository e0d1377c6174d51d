"""What a model's answer depends on, and how far to trust a map of that."""

from attnkit.interpret.explain import explain
from attnkit.interpret.explanation import Explanation
from attnkit.interpret.methods.table import METHODS

__all__ = ["METHODS", "Explanation", "explain"]
