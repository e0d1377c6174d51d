"""Which tokens are patches, and where they lie on the image."""

import math
from typing import Any, NamedTuple

from torch import nn

MAX_PREFIX_TOKENS = 16  # class and register tokens tried for a model that does not say


class Grid(NamedTuple):
    """Patches in reading order behind `num_prefix_tokens` class and register tokens."""

    rows: int
    columns: int
    num_prefix_tokens: int
    source: str
    """How it was found."""

    @property
    def num_tokens(self) -> int:
        return self.num_prefix_tokens + self.rows * self.columns


def find_grid(
    model: nn.Module,
    num_tokens: int,
    image_size: tuple[int, int],
    grid: tuple[int, int] | None = None,
    num_prefix_tokens: int | None = None,
) -> Grid:
    """The grid of a model's tokens, from what is given, else what the model says, else assumed.

    A model says it by a `patch_size` and by `num_prefix_tokens`. Else the fewest prefix tokens are
    taken that leave a grid of the image's proportions, and `source` says so.

    Raises:
        ValueError: the tokens form no such grid.
    """
    height, width = image_size
    told = num_prefix_tokens
    if told is None and grid is None:
        told = _said(model, "num_prefix_tokens", int)
    if grid is not None:
        prefix = num_tokens - grid[0] * grid[1]
        if prefix < 0 or prefix != (prefix if num_prefix_tokens is None else num_prefix_tokens):
            behind = "" if num_prefix_tokens is None else f" behind {num_prefix_tokens}"
            raise ValueError(
                f"grid: the model has {num_tokens} tokens, which are not {grid[0]} x {grid[1]}"
                f"{behind}"
            )
        return Grid(*grid, prefix, "as given")
    patches = patch_grid(model, image_size)
    if patches is not None:
        prefix = num_tokens - patches[0] * patches[1]
        # a pooling reads the patches alone
        if 0 <= prefix <= MAX_PREFIX_TOKENS and told in (None, prefix, prefix or told):
            return Grid(*patches, prefix, "of the model's patch_size")
    tried = [*dict.fromkeys([told, 0])] if told is not None else [*range(MAX_PREFIX_TOKENS + 1)]
    for prefix in tried:
        rows = round(math.sqrt(max(num_tokens - prefix, 0) * height / width))
        if rows and rows * round(rows * width / height) == num_tokens - prefix:
            source = f"assumed: the image's proportions behind {prefix} prefix tokens"
            return Grid(rows, (num_tokens - prefix) // rows, prefix, source)
    raise ValueError(
        f"grid: {num_tokens} tokens do not form a grid over an image of {height} x {width} behind "
        f"{tried[0]} to {tried[-1]} prefix tokens; give grid=(rows, columns)"
    )


def patch_grid(model: nn.Module, image_size: tuple[int, int]) -> tuple[int, int] | None:
    """Rows and columns of patches, if the model says the size of one and it divides the image."""
    size = _said(model, "patch_size", (int, tuple, list))
    if size is None:
        return None
    high, wide = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    if high < 2 or wide < 2 or image_size[0] % high or image_size[1] % wide:
        return None
    return image_size[0] // high, image_size[1] // wide


def _said(model: nn.Module, name: str, kinds: Any) -> Any:
    """An attribute of the first module that has it, the model before its parts."""
    for module in model.modules():
        value = getattr(module, name, None)
        if isinstance(value, kinds) and not isinstance(value, bool):
            return value
    return None
