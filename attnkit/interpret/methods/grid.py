"""Location of a model's tokens on the image: which of them are patches, and of which grid.

Proportions of the image are not used. A token lies where its gradient is, on a map that the model
computed earlier (such as that of the patch embedding) or on the image itself.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.capture.calls import AttentionCall
from attnkit.core.capture.watch import watch_attention
from attnkit.interpret.methods.hooks import Enough, ModuleRun, module_runs
from attnkit.interpret.methods.question import looking

MAX_SPECIAL_TOKENS = 16  # most class and register tokens that depend on patches, as a mean does
_MOST_MAPS = 6  # maps of different shapes, the latest first, on which tokens are located
_TILES = (1, 2, 4, 8, 16, 32)  # patch sides to try if tokens depend on more than a tile of a map
_NEGLIGIBLE = 1e-4  # share of the largest gradient that counts as 0


class Grid(NamedTuple):
    """Patches in reading order, between class and register tokens."""

    rows: int
    columns: int
    num_prefix_tokens: int
    num_suffix_tokens: int
    source: str
    """How the grid was found, in words."""
    has_queries: bool = True
    """Whether the queries are these tokens too; False if, for example, words look at patches."""

    @property
    def num_others(self) -> int:
        """Number of class and register tokens before and after the patches."""
        return self.num_prefix_tokens + self.num_suffix_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_others + self.rows * self.columns

    def patches(self, tokens: Tensor, dim: int = 1) -> Tensor:
        """Return the patches among all tokens, which are along `dim`."""
        return tokens.narrow(dim, self.num_prefix_tokens, self.rows * self.columns)

    def image(self, tokens: Tensor) -> Tensor:
        """Return the patches of [batch, tokens, …] as an image [batch, rows, columns, …]."""
        return self.patches(tokens).unflatten(1, (self.rows, self.columns))

    def others(self, tokens: Tensor, dim: int = 1) -> Tensor:
        """Return the class and register tokens, first those before the patches."""
        first, _, last = tokens.split(
            [self.num_prefix_tokens, self.rows * self.columns, self.num_suffix_tokens], dim
        )
        return torch.cat([first, last], dim)

    def __str__(self) -> str:
        behind = f" before {self.num_suffix_tokens} more" if self.num_suffix_tokens else ""
        return (
            f"grid {self.rows} x {self.columns} behind {self.num_prefix_tokens} prefix tokens"
            f"{behind}, {self.source}"
        )


class Source(NamedTuple):
    """A map, tokens or the images, from which later tokens may have been computed.

    fields: possible layouts: functions from the absolute gradient at `tensor` to [rows, columns],
        summed over the batch.
    """

    tensor: Tensor
    fields: tuple[Callable[[Tensor], Tensor], ...]

    def seen_by(self, y: Tensor) -> list[Tensor]:
        """Return the fields of the gradient of y; empty if y does not depend on the tensor."""
        (found,) = torch.autograd.grad(y, self.tensor, retain_graph=True, allow_unused=True)
        return [] if found is None else [field(found.abs().float()) for field in self.fields]


def locate(tokens: Tensor, sources: Sequence[Source]) -> Grid | None:
    """Return the grid of tokens on the first source on which they form one; None if on none.

    A token depends on a tile of the source, which gives the size of a patch. The tile of the middle
    token then gives the number of tokens before the patches, and the tokens at three corners of the
    grid must depend on their own tile more than on any other.

    Args:
        tokens: [batch, tokens, dim], in the graph of the sources.
        sources: sources to try, the closest to the tokens first, since the backward pass to others,
            and to the images in particular, may be long.
    """
    generator = torch.Generator().manual_seed(0)
    # a plain sum over channels of a layer norm's output would have no gradient
    direction = torch.randn(tokens.shape[-1], generator=generator).to(tokens)
    if not tokens.requires_grad:
        return None
    along = (tokens[0] * direction).sum(dim=-1)
    for source in sources:

        @cache
        def seen(number: int, source: Source = source) -> list[Tensor]:
            return source.seen_by(along[number])

        def seen_in(way: int, number: int, seen: Callable[[int], list[Tensor]] = seen) -> Tensor:
            return seen(number)[way]

        for way in range(len(seen(len(along) // 2))):
            found = _grid_on(partial(seen_in, way), len(along))
            # a grid with as many rows as tokens is attention heads, [batch, heads, tokens, dim]
            if found is not None and (source is sources[-1] or len(along) not in found[:2]):
                return found
    return None


def _grid_on(seen: Callable[[int], Tensor], num_tokens: int) -> Grid | None:
    """Return the grid, given the field [rows, columns] of a source that each token depends on."""
    eighths = [num_tokens * number // 8 for number in (4, 2, 6, 1, 3, 5, 7)]
    for number in dict.fromkeys((*eighths, num_tokens - 1, 0)):  # until one that is a patch
        field = seen(number)
        if field.any():
            break
    else:
        return None

    def place(number: int, tile: tuple[int, int]) -> int | None:
        cells = F.avg_pool2d(seen(number)[None, None], tile)[0, 0]
        return int(cells.argmax()) if cells.any() else None

    rows, columns = ((field > _NEGLIGIBLE * field.max()).any(dim=d).nonzero() for d in (1, 0))
    box = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
    for tile in dict.fromkeys([box, *((side, side) for side in _TILES)]):
        high, wide = (size // side for size, side in zip(field.shape, tile, strict=True))
        others = num_tokens - high * wide
        own = place(number, tile) if high and wide else None
        if own is None or (tile != box and others > min(MAX_SPECIAL_TOKENS, high * wide)):
            continue
        if others < 0:  # attention within windows, the first of which lies in a corner
            last = place(num_tokens - 1, tile)
            if tile == box and last is not None and place(0, tile) == 0:
                high, wide = last // wide + 1, last % wide + 1
                if high * wide == num_tokens:
                    return Grid(high, wide, 0, 0, "of a window, as tokens depend on the image")
            continue
        before = number - own
        if not 0 <= before <= others:
            continue
        behind = before + high * wide
        beside = [n for n in (before - 1, behind) if 0 <= n < num_tokens]
        if others > min(MAX_SPECIAL_TOKENS, high * wide) and any(
            place(n, tile) is not None for n in beside
        ):
            continue
        if all(place(before + m, tile) == m for m in (0, wide - 1, high * wide - 1)):
            return Grid(high, wide, before, others - before, "as tokens depend on the image")
    return None


def maps_among(
    runs: Sequence[ModuleRun], images: Tensor, calls: Sequence[AttentionCall] = ()
) -> list[Source]:
    """Return as sources the latest map of each shape that modules computed, and the images.

    Args:
        calls: calls of attention; tensors with the shape of their heads, [batch, heads, tokens,
            head_dim] or [batch, tokens, heads, head_dim], are no maps.
    """
    heads = {
        shape
        for call in calls
        for one in (call.query, call.key, call.value)
        for shape in (one.shape, one.transpose(1, 2).shape)
    }
    found: dict[torch.Size, Source] = {}
    for tensor in (made for run in reversed(runs) for made in run.made[:1]):
        is_of_images = tensor.ndim == 4 and tensor.requires_grad and len(tensor) == len(images)
        if is_of_images and tensor.shape not in heads:
            fields = tuple(partial(torch.sum, dim=others) for others in ((0, 1), (0, 3)))
            found.setdefault(tensor.shape, Source(tensor, fields))
    image = Source(images, (partial(torch.sum, dim=(0, 1)),))
    return [*list(found.values())[:_MOST_MAPS], image]


def heads_joined(*tensors: Tensor) -> Tensor:
    """Concatenate the channels of heads [batch, heads, tokens, head_dim] to [batch, tokens, dim].

    The tensors may have different numbers of heads.
    """
    return torch.cat([tensor.transpose(1, 2).flatten(2) for tensor in tensors], dim=-1)


Family = tuple[str, int]
"""The name of attention layers without its numbers, as in `family_of`, and the number of keys."""


def family_of(call: AttentionCall) -> Family:
    """Return the family of layers that attend over the same tokens as this call's layer."""
    return re.sub(r"\d+", "*", call.layer), call.num_keys


def token_grids(
    model: nn.Module,
    images: Tensor,
    num_tokens: int | None = None,
    ask: Callable[[Tensor], Any] | None = None,
) -> dict[Family, Grid | None]:
    """Return the grid of the keys of the first layer of each family, None if they form no grid.

    The result is empty if the model has no visible attention.

    Args:
        num_tokens: a number of keys, after which the model stops; 0: stop after any attention.
        ask: function that runs the model with other images; None: the model takes only images.
    """
    images = (images[:1] if ask is None else images).detach().clone().requires_grad_()
    first: dict[Family, tuple[AttentionCall, list[Source]]] = {}

    def look(run: ModuleRun | None = None) -> bool:
        for call in calls:
            if isinstance(call, AttentionCall) and family_of(call) not in first:
                seen = [call, *(one for one, _ in first.values())]
                first[family_of(call)] = call, maps_among(runs, images, seen)
        found = [size for _, size in first]
        if found and num_tokens is not None and (num_tokens in found or not num_tokens):
            raise Enough
        return True

    with looking(model):
        # a model without visible attention raises a ValueError
        with (
            suppress(Enough, ValueError),
            watch_attention(model) as calls,
            module_runs(model, look) as runs,
        ):
            (ask or model)(images.clone())
            look()
        grids = {}
        for family, (call, maps) in first.items():
            found = locate(heads_joined(call.key, call.value), maps)
            if found is not None and ask is not None and call.is_self:
                of_queries = locate(heads_joined(call.query), maps)
                is_same = of_queries is not None and of_queries[:4] == found[:4]
                found = found._replace(has_queries=is_same)
            grids[family] = found
    return grids


def find_grid(
    model: nn.Module,
    images: Tensor,
    num_tokens: int,
    grid: tuple[int, int] | None = None,
    num_prefix_tokens: int | None = None,
) -> Grid:
    """Return the grid of a model's attention tokens; run the model unless all is given.

    Raises:
        ValueError: the given grid does not fit, or the grid cannot be found.
    """
    found = None
    if grid is None or num_prefix_tokens is None:
        grids = token_grids(model, images, num_tokens)
        found = next((one for (_, size), one in grids.items() if size == num_tokens), None)
    return settled(model, images, num_tokens, found, grid, num_prefix_tokens)


def settled_grids(
    model: nn.Module,
    images: Tensor,
    grid: tuple[int, int] | None = None,
    num_prefix_tokens: int | None = None,
    ask: Callable[[Tensor], Any] | None = None,
) -> dict[Family, Grid | None]:
    """Return the grid of each family of layers, as `find_grid` does; None if there is none.

    This runs the model once.

    Args:
        ask: as in `token_grids`.
    """
    grids = token_grids(model, images, ask=ask)
    for family, found in grids.items():
        if found is None and ask is not None and None in (grid, num_prefix_tokens):
            continue  # these keys may be words; the model's own attributes describe its images
        try:
            given = grid, num_prefix_tokens
            grids[family] = settled(model, images, family[1], found, *given)
        except ValueError:
            grids[family] = None
    return grids


def settled(
    model: nn.Module,
    images: Tensor,
    num_tokens: int,
    found: Grid | None,
    grid: tuple[int, int] | None,
    num_prefix_tokens: int | None,
) -> Grid:
    """Return the given grid, else the found one, else that of the model's attributes.

    Raises:
        ValueError: the given grid does not fit the tokens, or no grid is known.
    """
    height, width = images.shape[-2:]
    if found is None and None in (grid, num_prefix_tokens):
        found = _declared_grid(model, images, num_tokens)
    behind = "" if num_prefix_tokens is None else f" behind {num_prefix_tokens} prefix tokens"
    if grid is not None:
        others = num_tokens - grid[0] * grid[1]
        if others < (num_prefix_tokens or 0):
            raise ValueError(
                f"grid: the model has {num_tokens} tokens, which are not {grid[0]} x {grid[1]}"
                f"{behind}"
            )
        if found is not None and found[:2] == grid and num_prefix_tokens is None:
            return found._replace(source="as given")
        if num_prefix_tokens is None and others:
            raise ValueError(
                f"num_prefix_tokens: {others} of {num_tokens} tokens are not of a grid of "
                f"{grid[0]} x {grid[1]}; say how many of them stand before it"
            )
        before = num_prefix_tokens or 0
        return Grid(*grid, before, others - before, "as given")
    if found is None or num_prefix_tokens not in (None, found.num_prefix_tokens):
        what = "do not form a grid" if found is not None else "do not form a grid that is known"
        raise ValueError(
            f"grid: {num_tokens} tokens {what} over an image of {height} x {width}{behind}; give "
            "grid=(rows, columns) and num_prefix_tokens=, how many tokens stand before it"
        )
    return found


def _declared_grid(model: nn.Module, images: Tensor, num_tokens: int) -> Grid | None:
    """Return the grid of the patch embedding and the model's `num_prefix_tokens`, if it fits."""
    patches = patch_grid(model, images)
    if patches is None:
        return None
    others = num_tokens - patches.rows * patches.columns
    declared = (getattr(module, "num_prefix_tokens", None) for module in model.modules())
    if others and others != next((number for number in declared if type(number) is int), None):
        return None
    return Grid(patches.rows, patches.columns, others, 0, "as the model says")


class PatchGrid(NamedTuple):
    """The patches into which a patch embedding cuts an image.

    rows, columns: numbers of patches.
    size: height and width of a patch in pixels. Pixels below or to the right of the last whole
        patch belong to no patch; if the model pads, the last patches reach beyond the image.
    """

    rows: int
    columns: int
    size: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def covered(self) -> tuple[int, int]:
        """Height and width in pixels of all patches together."""
        return self.rows * self.size[0], self.columns * self.size[1]

    def are_in(self, grid: tuple[int, int]) -> bool:
        """Return whether each place of a grid consists of whole patches."""
        return not (self.rows % grid[0] or self.columns % grid[1])


def patch_grid(model: nn.Module, images: Tensor) -> PatchGrid | None:
    """Return the patches that the model's patch embedding makes of the first image.

    The patch embedding is the first module with a `patch_size` of more than a pixel whose input has
    the size of the image; the `patch_size` of other blocks counts places of a feature map. The
    number of patches is that of the map computed inside it. None if there is no such module.
    """
    size = height, width = tuple(images.shape[-2:])
    asked: tuple[int, int] | None = None
    made: tuple[int, int] | None = None

    def look(run: ModuleRun) -> bool:
        nonlocal asked, made
        given = [(each.module, each.given) for each in run.path()] + [(model, [images])]
        for module, tensors in given:
            if any(t.ndim == 4 and t.shape[-2:] == size for t in tensors):
                asked = _patch_size(module) or asked  # the outermost module decides
        if asked and isinstance(run.output, Tensor) and run.output.ndim == 4:
            for shape in (run.output.shape[2:], run.output.shape[1:3]):
                sides = zip(shape, size, asked, strict=True)
                if all(n in (whole // side, -(-whole // side)) for n, whole, side in sides):
                    made = shape[0], shape[1]
                    raise Enough
        if asked and getattr(run.module, "patch_size", None) is not None:
            raise Enough
        return False

    if not any(_patch_size(module) for module in model.modules()):
        return None
    with looking(model), torch.no_grad(), suppress(Enough), module_runs(model, look):
        model.forward(images[:1].detach().clone())  # not model(…), whose hooks count forwards
    if asked is None or (made is None and (height % asked[0] or width % asked[1])):
        return None
    return PatchGrid(*(made or (height // asked[0], width // asked[1])), asked)


def _patch_size(module: nn.Module) -> tuple[int, int] | None:
    """Return a module's `patch_size` as height and width; None if it is missing or one pixel."""
    size = getattr(module, "patch_size", None)
    if isinstance(size, bool) or not isinstance(size, int | tuple | list):
        return None
    pair = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return pair if len(pair) == 2 and min(pair) > 1 else None
