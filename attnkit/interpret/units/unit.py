"""What an explanation gives numbers to, and what has to be known of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from matplotlib.figure import Figure
from torch import Tensor

from attnkit.interpret.methods.question import Target

if TYPE_CHECKING:
    from attnkit.interpret.explanation import Explanation


class Unit:
    """The parts of an input that have a number each: what they are called, how they are taken away
    and how their numbers are shown. A subclass a file.

    Attributes:
        name: "patch", "word" or "edge".
        target: what was asked.
        values: a number for each unit, [batch, rows, columns], [batch, words, rows, columns] or
            [edges].
        share: what tokens or edges that are no units took of the sum of sizes; None: all are.
    """

    name = ""

    def __init__(self, target: Target, values: Tensor) -> None:
        self.target = target
        self.values = values
        self.share: Annotated[Tensor, "*batch"] | None = None

    def lines(self, seen: Explanation) -> list[str]:
        """An explanation in words."""
        raise NotImplementedError

    def arrays(self) -> dict[str, Tensor]:
        """The tensors that are saved, by name."""
        raise NotImplementedError

    def draw(self, seen: Explanation, *args: Any, **options: Any) -> Figure:
        """A picture of the values."""
        raise NotImplementedError

    def trust(self, seen: Explanation, **options: Any) -> Any:
        """How far to trust the values, by what the answer loses without what they rank first."""
        raise NotImplementedError
