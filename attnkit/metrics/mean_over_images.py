"""What the metrics of maps share: a number for each image, and their mean over all ranks."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor
from torchmetrics import Metric


class MeanOverImages(Metric):
    """The mean of a number that each image has; its standard error on request.

    Only sums are kept, so that a whole test set costs four numbers and ranks are added up.

    Args:
        over_chance: the mean divided by that of what chance gives.
        **kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: in `compute`, no images at all.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    state: str
    """The name of the sums. A `MetricCollection` takes metrics for one whose states have the same
    names and, at the first batch, values: each kind needs its own name."""

    def __init__(self, *, over_chance: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.over_chance = over_chance
        self.add_state(self.state, torch.zeros(4), dist_reduce_fx="sum")

    def add(
        self, values: Annotated[Tensor, "batch"], chances: Annotated[Tensor, "batch"] | None = None
    ) -> None:
        """Add the numbers of some images, and what chance gives for them."""
        chances = torch.zeros_like(values) if chances is None else chances
        of_batch = torch.stack((values, values.square(), torch.ones_like(values), chances)).sum(1)
        setattr(self, self.state, getattr(self, self.state) + of_batch.to(self.device))

    def compute(self) -> Annotated[Tensor, ""]:
        """The mean over the images, over that of chance with `over_chance`: a scalar."""
        total, _, count, chances = self._sums()
        return total / (chances if self.over_chance else count)

    def standard_error(self) -> Annotated[Tensor, ""]:
        """Of the mean number, over the images: √(variance / images); NaN of one image.

        Under several processes each must call it, and has that of the images of all. Chance is
        taken as known.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync):
            total, squares, count, chances = self._sums()
        variance = (squares - total.square() / count).clamp(min=0) / (count - 1)
        error = (variance / count).sqrt()
        return error * count / chances if self.over_chance else error

    def _sums(self) -> Tensor:
        sums = getattr(self, self.state)
        if not sums[2]:
            raise ValueError(f"{type(self).__name__}: expected images to score, got none")
        return sums
