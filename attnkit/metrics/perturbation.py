"""The gap between removing the lowest-ranked and the highest-ranked patches first."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from attnkit.metrics.mean_over_images import MeanOverImages

Curves = Annotated[Tensor, "batch points"]


class PerturbationGap(MeanOverImages):
    """The area under the curve of least-first removal minus that of most-first removal.

        gap = ∫ y_least(s) ds − ∫ y_most(s) ds,   s the share of the image that is removed

    by trapezia, for each image, and the mean over the images. y is the probability or the logit of
    the target; in least-first order the places that the map ranks lowest go first. A random map
    has expectation 0, whatever replaces the removed places; this holds for neither area alone.
    `attnkit.perturbation_curves` makes the curves of any map.

    Source: the area between perturbation curves of Tomsett et al. (Sanity checks for saliency
    metrics, 2020) and others, of the removals of Samek et al. (2017). Both end points count here.

    Args:
        **kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: curves of different shapes, shares that do not rise from 0 to 1; in `compute`,
            no images at all.
    """

    state = "gaps"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def update(
        self,
        most_first: Curves,
        least_first: Curves,
        removed: Annotated[Tensor, "points"] | None = None,
    ) -> None:
        """Add the curves of some images.

        Args:
            most_first, least_first: the target's value at each share removed, in the two orders.
            removed: those shares, rising from 0 to 1; None: evenly spaced.
        """
        self.add(perturbation_gap(most_first, least_first, removed))


def perturbation_gap(
    most_first: Annotated[Tensor, "*batch points"],
    least_first: Annotated[Tensor, "*batch points"],
    removed: Annotated[Tensor, "points"] | None = None,
) -> Annotated[Tensor, "*batch"]:
    """Return the area between the two curves of each image; arguments as in the metric."""
    if most_first.shape != least_first.shape:
        raise ValueError(
            f"least_first: expected the shape of most_first {list(most_first.shape)}, "
            f"got {list(least_first.shape)}"
        )
    points = most_first.shape[-1] if most_first.ndim else 0
    if points < 2:
        raise ValueError(
            "most_first: expected [batch, points] with 2 points or more, "
            f"got the shape {list(most_first.shape)}"
        )
    if removed is None:
        removed = torch.linspace(0, 1, points, device=most_first.device)
    check_removed(removed, points)
    return torch.trapezoid(least_first - most_first, removed.to(most_first), dim=-1)


def check_removed(removed: Tensor, points: int) -> None:
    """Raise a ValueError unless `removed` are `points` shares that rise from 0 to 1."""
    if list(removed.shape) != [points]:
        raise ValueError(
            f"removed: expected {points} shares, as the curves have points, "
            f"got the shape {list(removed.shape)}"
        )
    if removed[0] != 0 or removed[-1] != 1 or not (removed.diff() >= 0).all():
        raise ValueError(f"removed: expected shares rising from 0 to 1, got {removed.tolist()}")
