"""Which tokens are patches, and where they lie on the image, as the model made them.

Nothing is taken from proportions. A token lies where its gradient is, on a map that the model made
before it (that of the patch embedding) or on the image itself.
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

MAX_SPECIAL_TOKENS = 16  # class and register tokens that may see patches, as their mean does
_MOST_MAPS = 6  # of different shapes, the latest first, on which tokens are looked for
_TILES = (1, 2, 4, 8, 16, 32)  # sides tried where tokens see more of a map than a tile of it
_NEGLIGIBLE = 1e-4  # of the largest gradient


class Grid(NamedTuple):
    """Patches in reading order, between class and register tokens."""

    rows: int
    columns: int
    num_prefix_tokens: int
    num_suffix_tokens: int
    source: str
    """How it was found."""
    has_queries: bool = True
    """Whether the queries of as many are these tokens too; not so where words look at patches."""

    @property
    def num_others(self) -> int:
        """Class and register tokens, before and behind the patches."""
        return self.num_prefix_tokens + self.num_suffix_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_others + self.rows * self.columns

    def patches(self, tokens: Tensor, dim: int = 1) -> Tensor:
        """The patches among all tokens, which `dim` counts."""
        return tokens.narrow(dim, self.num_prefix_tokens, self.rows * self.columns)

    def image(self, tokens: Tensor) -> Tensor:
        """The patches as an image, [batch, tokens, …] to [batch, rows, columns, …]."""
        return self.patches(tokens).unflatten(1, (self.rows, self.columns))

    def others(self, tokens: Tensor, dim: int = 1) -> Tensor:
        """The class and register tokens, those before the patches first."""
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
    """Something over the images that tokens may have been made of.

    fields: ways to read it, each from the size of a gradient of `tensor` to [rows, columns], summed
        over the batch.
    """

    tensor: Tensor
    fields: tuple[Callable[[Tensor], Tensor], ...]

    def seen_by(self, y: Tensor) -> list[Tensor]:
        """The fields of the gradient of a number; none where it is not made of the tensor."""
        (found,) = torch.autograd.grad(y, self.tensor, retain_graph=True, allow_unused=True)
        return [] if found is None else [field(found.abs().float()) for field in self.fields]


def locate(tokens: Tensor, sources: Sequence[Source]) -> Grid | None:
    """Where tokens lie on the first of the sources on which they form a grid; None: on none.

    Of each source a token sees a tile, which says how large a patch is there. The token in the
    middle then tells how many stand before the patches, and those at three corners of the grid
    have to see their own tile more than any other.

    Args:
        tokens: [batch, tokens, dim], in the graph of the sources.
        sources: where to look, the closest to the tokens first: the way back to the others, the
            images above all, may be long.
    """
    generator = torch.Generator().manual_seed(0)
    # no plain sum over channels: that of a layer norm's output has no gradient
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
            # as many rows as tokens are heads of attention, [batch, heads, tokens, head_dim]
            if found is not None and (source is sources[-1] or len(along) not in found[:2]):
                return found
    return None


def _grid_on(seen: Callable[[int], Tensor], num_tokens: int) -> Grid | None:
    """The grid, by what each token sees of a source, [rows, columns]."""
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
        if others < 0:  # attention within windows, of which the first lies in a corner
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
    """The latest map of each shape that modules made, and the images, as sources.

    Args:
        calls: of attention; what has the shape of their heads, [batch, heads, tokens, head_dim] or
            [batch, tokens, heads, head_dim], is no map.
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
    """What tokens are told by, [batch, heads, tokens, head_dim] each, as [batch, tokens, channels].

    Where the heads of some are fewer, all of their channels are there once.
    """
    return torch.cat([tensor.transpose(1, 2).flatten(2) for tensor in tensors], dim=-1)


Family = tuple[str, int]
"""Layers of attention that differ by numbers in their names alone, as in `family_of`, and the
number of their keys."""


def family_of(call: AttentionCall) -> Family:
    """What layers share that attend over the same tokens: names without numbers, number of keys."""
    return re.sub(r"\d+", "*", call.layer), call.num_keys


def token_grids(
    model: nn.Module,
    images: Tensor,
    num_tokens: int | None = None,
    ask: Callable[[Tensor], Any] | None = None,
) -> dict[Family, Grid | None]:
    """Where the keys of the first layer of each family lie on the images.

    None where they form no grid. Nothing is in it where no attention is seen.

    Args:
        num_tokens: a number of keys; the model then stops behind it. 0: any.
        ask: runs the model with images in the place of these; None: the model takes an image alone.
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
        # attention that is not seen is none
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
    """The grid of the tokens of a model's attention; the model runs once, if not all is given.

    Raises:
        ValueError: what is given does not fit, or it cannot be known.
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
    """The grid of `find_grid` of each family of layers; None where there is none.

    The model runs once, before a run in which these are needed.

    Args:
        ask: as of `token_grids`.
    """
    grids = token_grids(model, images, ask=ask)
    for family, found in grids.items():
        if found is None and ask is not None and None in (grid, num_prefix_tokens):
            continue  # words, say; what the model says of itself is of its images
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
    """What is given, else what was found, else what the model says of itself.

    Raises:
        ValueError: what is given does not fit the tokens, or it is not known.
    """
    height, width = images.shape[-2:]
    if found is None and None in (grid, num_prefix_tokens):
        found = _said_grid(model, images, num_tokens)
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


def _said_grid(model: nn.Module, images: Tensor, num_tokens: int) -> Grid | None:
    """By the patch embedding and the model's own `num_prefix_tokens`, where they explain all."""
    patches = patch_grid(model, images)
    if patches is None:
        return None
    others = num_tokens - patches.rows * patches.columns
    said = (getattr(module, "num_prefix_tokens", None) for module in model.modules())
    if others and others != next((number for number in said if type(number) is int), None):
        return None
    return Grid(patches.rows, patches.columns, others, 0, "as the model says")


class Patches(NamedTuple):
    """What a patch embedding cuts an image into.

    rows, columns: of patches.
    size: height and width of a patch in pixels. Pixels below or to the right of the last whole
        patch are in none; where the model pads, the last patches reach beyond the image.
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
        """Whether each place of a grid is a number of whole patches."""
        return not (self.rows % grid[0] or self.columns % grid[1])


def patch_grid(model: nn.Module, images: Tensor) -> Patches | None:
    """The patches of the images, as the model's patch embedding made them of the first.

    It is the first module that has a `patch_size` of more than a pixel and is given an image of
    this size: the `patch_size` of a block counts the places of a feature map. How many patches
    there are says the map that is made inside it. None where there is no such module.
    """
    size = height, width = tuple(images.shape[-2:])
    asked: tuple[int, int] | None = None
    made: tuple[int, int] | None = None

    def look(run: ModuleRun) -> bool:
        nonlocal asked, made
        given = [(each.module, each.given) for each in run.path()] + [(model, [images])]
        for module, tensors in given:
            if any(t.ndim == 4 and t.shape[-2:] == size for t in tensors):
                asked = _patch_size(module) or asked  # of the outermost
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
        model.forward(images[:1].detach().clone())  # no call: it is no forward that counts
    if asked is None or (made is None and (height % asked[0] or width % asked[1])):
        return None
    return Patches(*(made or (height // asked[0], width // asked[1])), asked)


def _patch_size(module: nn.Module) -> tuple[int, int] | None:
    """Height and width of the patches of several pixels that a module says it has."""
    said = getattr(module, "patch_size", None)
    if isinstance(said, bool) or not isinstance(said, int | tuple | list):
        return None
    pair = (said, said) if isinstance(said, int) else tuple(said)[-2:]
    return pair if len(pair) == 2 and min(pair) > 1 else None
