"""Sliding windows over images larger than a model takes."""

from collections.abc import Callable
from typing import Annotated

from torch import Tensor
from torch.nn import functional


def slide(
    model: Callable[[Tensor], Tensor],
    images: Annotated[Tensor, "batch channels height width"],
    window: tuple[int, int],
    overlap: float = 0.25,
) -> Annotated[Tensor, "batch classes height width"]:
    """Return the mean of a model's logits over all windows that contain a pixel.

    Windows are spaced evenly, so that they overlap by at least the given share of their sides and
    the last one ends at the edge. An image smaller than the window is padded with its last row and
    column.

    Args:
        model: maps images of the window's size to logits of every pixel.
        images: images of one size.
        window: height and width of a window in pixels.
        overlap: share of a window's sides, from 0 to below 1.
    """
    height, width = images.shape[-2:]
    below, beside = max(0, window[0] - height), max(0, window[1] - width)
    if below or beside:  # replication padding needs floats
        grown = functional.pad(images.float(), (0, beside, 0, below), mode="replicate")
        images = grown.to(images.dtype)
    tops, lefts = (
        _starts(size, side, overlap) for size, side in zip(images.shape[-2:], window, strict=True)
    )
    total: Tensor | None = None
    for top in tops:
        for left in lefts:
            area = ..., slice(top, top + window[0]), slice(left, left + window[1])
            logits = model(images[area])
            if total is None:
                shape = (*logits.shape[:2], *images.shape[-2:])
                total, count = logits.new_zeros(shape), logits.new_zeros(shape[-2:])
            total[area] += logits
            count[area] += 1
    assert total is not None
    return (total / count)[..., :height, :width]


def _starts(size: int, side: int, overlap: float) -> list[int]:
    """Return the first pixels of evenly spaced windows along a side."""
    steps = -(-(size - side) // max(1, int(side * (1 - overlap))))
    return [round(n * (size - side) / max(1, steps)) for n in range(steps + 1)]
