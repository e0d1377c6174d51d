"""Metrics of whether maps point to known objects."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from attnkit.metrics.mean_over_images import MeanOverImages

Maps = Annotated[Tensor, "batch map_height map_width"]
Masks = Annotated[Tensor, "batch height width", bool]


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
