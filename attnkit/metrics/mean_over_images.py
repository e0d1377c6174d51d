"""The base class of metrics of maps: the mean over images of a number for each image."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor
from torchmetrics import Metric


class MeanOverImages(Metric):
    """The mean of a number that each image has; its standard error on request.

    Only four sums are stored, which are added over ranks.

    Args:
        over_chance: whether the mean is divided by the mean score by chance.
        **kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: in `compute`, no images at all.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    state: str
    """The name of the state. A `MetricCollection` merges metrics whose states have equal names and,
    at the first batch, equal values, so each kind needs its own name."""

    def __init__(self, *, over_chance: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.over_chance = over_chance
        self.add_state(self.state, torch.zeros(4), dist_reduce_fx="sum")

    def add(
        self, values: Annotated[Tensor, "batch"], chances: Annotated[Tensor, "batch"] | None = None
    ) -> None:
        """Add the numbers of some images, and their scores by chance."""
        chances = torch.zeros_like(values) if chances is None else chances
        of_batch = torch.stack((values, values.square(), torch.ones_like(values), chances)).sum(1)
        setattr(self, self.state, getattr(self, self.state) + of_batch.to(self.device))

    def compute(self) -> Annotated[Tensor, ""]:
        """Return the mean over the images, divided by that of chance with `over_chance`."""
        total, _, count, chances = self._sums()
        return total / (chances if self.over_chance else count)

    def standard_error(self) -> Annotated[Tensor, ""]:
        """Return the standard error of the mean, √(variance / images); NaN for one image.

        With several processes all must call it, and each gets that over all images. Chance counts
        as known exactly.
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
