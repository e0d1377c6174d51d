"""The base class of units, the parts of an input to which an explanation gives numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from matplotlib.figure import Figure
from torch import Tensor

from attnkit.interpret.methods.question import Target

if TYPE_CHECKING:
    from attnkit.interpret.explanation import Explanation


class Unit:
    """The parts of an input that have a number each: their name, their removal and their display.

    There is one file for each subclass.

    Attributes:
        name: "patch", "word" or "edge".
        target: the question.
        values: a number for each unit, [batch, rows, columns] or [edges].
        share: share of the sum of absolute values of tokens or edges that are no units; None: all
            are units.
    """

    name = ""

    def __init__(self, target: Target, values: Tensor) -> None:
        self.target = target
        self.values = values
        self.share: Annotated[Tensor, "*batch"] | None = None

    def lines(self, seen: Explanation) -> list[str]:
        """Return an explanation in words, as lines."""
        raise NotImplementedError

    def arrays(self) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""
        raise NotImplementedError

    def draw(self, seen: Explanation, *args: Any, **options: Any) -> Figure:
        """Draw the values."""
        raise NotImplementedError

    def trust(self, seen: Explanation, **options: Any) -> Any:
        """Measure how far to trust the values: what the answer loses without top-ranked units."""
        raise NotImplementedError
