"""Metrics of maps: whether they lie on the object, and what the removal of patches does."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor
from torchmetrics import Metric

Maps = Annotated[Tensor, "batch map_height map_width"]
Masks = Annotated[Tensor, "batch height width", bool]
Curves = Annotated[Tensor, "batch points"]


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


class _OnObjects(MeanOverImages):
    """Base class of metrics with a share for each image; a constant map scores the mask's area."""

    def update(self, maps: Maps, masks: Masks) -> None:
        """Add some images.

        Args:
            maps: maps of any size, which may differ from that of the masks.
            masks: True = the object.
        """
        check_maps(maps, masks)
        self.add(self.score(maps, masks), area(masks))

    def score(self, maps: Maps, masks: Masks) -> Annotated[Tensor, "batch"]:
        """Return the share of each image."""
        raise NotImplementedError


class PointingGame(_OnObjects):
    """The share of maps whose largest value is on the object (Zhang et al., Top-down neural
    attention by excitation backprop, 2018).

    If several places share the largest value, their mean is taken. So a constant map scores chance,
    the mask's share of the image; counting any one of them would give it 1. If the map is coarser
    than the mask, a place counts by the share of it that the mask covers. There is no tolerance
    around the mask; the paper has 15 pixels.

    Args:
        over_chance: the mean divided by the mean share of the masks: 1 is a map at random.
        **kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: shapes that do not go together, a mask without a True, a map with NaN; in
            `compute`, no images at all.
        TypeError: maps that are not floating-point tensors, masks that are not boolean.
    """

    state = "hits"

    def score(self, maps: Maps, masks: Masks) -> Annotated[Tensor, "batch"]:
        return pointing(maps, masks)


class AttributionMass(_OnObjects):
    """The share of a map's positive values that lies on the object.

        mass = Σ_inside max(map, 0) / Σ max(map, 0)

    For a random map, and for one without positive values, it is the mask's share of the image.
    A map that is coarser than the mask is taken as constant within each of its places.

    Args:
        over_chance: the mean divided by the mean share of the masks: 1 is a map at random. The
            ratio of the means, as a mean of ratios is that of the smallest objects.
        **kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError, TypeError: as `PointingGame`.
    """

    state = "masses"

    def score(self, maps: Maps, masks: Masks) -> Annotated[Tensor, "batch"]:
        return mass(maps, masks)


def pointing(maps: Maps, masks: Masks) -> Annotated[Tensor, "batch"]:
    """Return the share of the map's largest place that the mask covers, the mean over ties."""
    inside = covered(masks, maps)
    largest = (maps == maps.amax(dim=(1, 2), keepdim=True)).to(inside)
    return (largest * inside).sum(dim=(1, 2)) / largest.sum(dim=(1, 2))


def mass(maps: Maps, masks: Masks) -> Annotated[Tensor, "batch"]:
    """Return the share of the map's positive values that is in the mask."""
    inside = covered(masks, maps)
    positive = maps.clamp(min=0).to(inside)
    whole = positive.sum(dim=(1, 2))
    share = (positive * inside).sum(dim=(1, 2)) / whole
    return torch.where(whole > 0, share, inside.mean(dim=(1, 2)))


def area(masks: Masks) -> Annotated[Tensor, "batch"]:
    """Return the share of the image that is in the mask, which is the score by chance."""
    return masks.float().mean(dim=(1, 2))


def covered(masks: Masks, maps: Maps) -> Maps:
    """Return the share of each place of the map that the mask covers."""
    rows, columns = maps.shape[1:]
    return on_grid(masks.to(maps.device), (rows, columns))


def on_grid(
    masks: Annotated[Tensor, "*batch height width", bool], grid: tuple[int, int]
) -> Annotated[Tensor, "*batch map_height map_width"]:
    """Return the share of each place of a grid that the mask covers.

    Places are rectangles of the image. The mass of a map on the object is Σ map · share, exactly,
    even if places start between pixels or are smaller than pixels.
    """
    rows, columns = (
        _overlap(places, side, masks.device)
        for places, side in zip(grid, masks.shape[-2:], strict=True)
    )
    return rows @ masks.float() @ columns.T


def _overlap(places: int, side: int, device: torch.device) -> Tensor:
    """Return the share of each place that every pixel covers along one side, [places, side]."""
    ends = torch.arange(places + 1, device=device) * side  # in pixels, times places
    pixels = torch.arange(side + 1, device=device) * places
    first = torch.maximum(ends[:-1, None], pixels[:-1])
    last = torch.minimum(ends[1:, None], pixels[1:])
    return (last - first).clamp(min=0) / side


def check_maps(maps: Tensor, masks: Tensor) -> None:
    """Raise a ValueError or TypeError unless maps and masks fit together."""
    if not isinstance(maps, Tensor) or not maps.is_floating_point():
        raise TypeError(f"maps: expected a floating-point tensor, got {_kind(maps)}")
    if not isinstance(masks, Tensor) or masks.dtype != torch.bool:
        raise TypeError(f"masks: expected a boolean tensor, True = the object, got {_kind(masks)}")
    for name, tensor in (("maps", maps), ("masks", masks)):
        if tensor.ndim != 3 or not tensor[:1].numel() >= min(len(tensor), 1):
            raise ValueError(f"{name}: expected [batch, height, width], got {list(tensor.shape)}")
    if len(maps) != len(masks):
        raise ValueError(f"masks: expected one for each of {len(maps)} maps, got {len(masks)}")
    if not maps.isfinite().all():
        raise ValueError("maps: expected finite values, got NaN or infinite ones")
    empty = (~masks.flatten(1).any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"masks: expected an object in each, got none in {empty[0]}")


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


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
