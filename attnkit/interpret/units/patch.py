"""The unit of explanations of images: patches on the model's own grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from attnkit.interpret.methods.grid import find_grid
from attnkit.interpret.methods.question import Question
from attnkit.interpret.picture import Panel, Row, as_picture, draw, overlay_scale
from attnkit.interpret.units.unit import Unit

if TYPE_CHECKING:
    from attnkit.interpret.explanation import Explanation
    from attnkit.interpret.trust.result import Trust

MOST_LINES = 4
"""Number of images that have a line each; the others are counted."""


class Patches(Unit):
    """The patches of images.

    Attributes:
        values: [batch, rows, columns].
        tokens: [batch, tokens], with the class and register tokens; None if the method gives only
            the image.
        num_prefix_tokens, num_suffix_tokens: number of tokens before and after the patches.
    """

    name = "patch"
    target: Question

    def __init__(self, target: Question, found: Tensor) -> None:
        self.tokens: Tensor | None = None
        self.num_prefix_tokens = self.num_suffix_tokens = 0
        if found.ndim == 3:
            super().__init__(target, found)
            return
        if target.chain is not None:
            grid = target.chain.grid
        else:
            number = found.shape[1]
            given = target.grid, target.num_prefix_tokens
            grid = find_grid(target.model, target.images, number, *given)
        super().__init__(target, grid.patches(found).unflatten(1, (grid.rows, grid.columns)))
        self.tokens = found
        self.num_prefix_tokens = grid.num_prefix_tokens
        self.num_suffix_tokens = grid.num_suffix_tokens
        if grid.num_others:
            total, others = found.abs().sum(dim=1), grid.others(found).abs().sum(dim=1)
            self.share = torch.where(total > 0, others / total, torch.zeros_like(total))

    def trust(self, seen: Explanation, **options: Any) -> Trust:
        """Compute `attnkit.trust` of the map."""
        from attnkit.interpret.trust.judge import trust

        known: dict[str, Any] = {"target": seen.target, "map": self.values, "method": seen.again}
        known["of"] = self.target.of
        if self.tokens is not None:
            known["grid"] = tuple(self.values.shape[1:])  # also if the model does not declare it
        return trust(self.target.model, self.target.images.detach(), **known | options)

    def arrays(self) -> dict[str, Tensor]:
        """Return the map, and the tokens with their prefix."""
        return {"map": self.values} | ({} if self.tokens is None else {"tokens": self.tokens})

    def draw(
        self,
        seen: Explanation,
        names: Sequence[Sequence[str]] | None = None,
        pictures: Annotated[Tensor, "batch channels height width"] | None = None,
    ) -> Figure:
        """Draw a row for each image: the image with its prediction, and the image with its map.

        The map is drawn on the light image, with one colour for each place of its grid. Each image
        has its own scale, drawn beside it.

        Args:
            names: words, for captioners; not used here.
            pictures: images to draw instead of the model's (normalized) inputs.
        """
        shown = self.target.images.detach() if pictures is None else pictures
        return draw(
            [self._row(seen, number, as_picture(one), names) for number, one in enumerate(shown)]
        )

    def lines(self, seen: Explanation) -> list[str]:
        """Return what was explained, and a line for each of the first images."""
        batch, rows, columns = seen.map.shape
        lines = [f"{seen.method} of {batch} image{'s' * (batch > 1)} on {rows} x {columns}"]
        for number in range(min(batch, MOST_LINES)):
            one = seen.map[number]
            row, column = divmod(int(one.argmax()), columns)
            lines.append(
                f"  {number}: {self.line(seen, number)}; largest {float(one.max()):.3g} at row "
                f"{row}, column {column}"
            )
        if batch > MOST_LINES:
            lines.append(f"  … {batch - MOST_LINES} more")
        return [*lines, *(f"  ({note})" for note in seen.notes)]

    def line(self, seen: Explanation, number: int) -> str:
        """Return the question and the model's answer for an image."""
        target, predicted = int(seen.target[number]), int(seen.predicted[number])
        model = "predicted" if target == predicted else f"predicted {predicted}"
        number_of = f"{seen.quantity.symbol} = {float(seen.probability[number]):.3f}"
        parts = [f"class {target} ({model}), {number_of}"]
        if not seen.has_target:
            parts[0] += " (the map does not depend on the class)"
        if self.share is not None:
            parts.append(f"class and register tokens: {100 * float(self.share[number]):.0f} %")
        return "; ".join(parts)

    def _panels(self, seen: Explanation, number: int, names: Any) -> tuple[Tensor, list[str], str]:
        """Return the maps of an image, their titles and the label of their scale."""
        return self.values[number : number + 1], [""], seen.method

    def _row(self, seen: Explanation, number: int, picture: np.ndarray, names: Any) -> Row:
        maps, titles, label = self._panels(seen, number, names)
        panels = [Panel(picture, *one) for one in zip(maps, titles, strict=True)]
        says = Panel(picture, title=self.line(seen, number).replace("; ", "\n"))
        return Row([says, *panels], overlay_scale(maps, is_signed=seen.is_signed), label)
