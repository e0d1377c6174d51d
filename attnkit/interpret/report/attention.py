"""Data of a page on patches and heads: what each looks at, and p without each patch."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.interpret.diagnosis import SINK
from attnkit.interpret.explanation import Explanation
from attnkit.interpret.methods.grid import Grid as TokenGrid
from attnkit.interpret.methods.question import Question, looking
from attnkit.interpret.methods.tokens import Chain, Step, watch
from attnkit.interpret.picture import Scale
from attnkit.interpret.report.page import colour_bar, map_uri
from attnkit.interpret.trust.curves import answers_without_each, of_images
from attnkit.interpret.trust.removal import REMOVALS, NotAvailableError, removal, removal_grid

MOST_CELLS = 256
"""Maximum number of places of a page's grid, since the page stores places × places numbers."""
MOST_LAYERS = 3
"""Number of layers for which a page shows what every patch looks at; 196 patches need 40 kB for a
layer and image."""
MOST_ROWS = 16
"""Number of evenly spaced queries of a layer whose attention the table of heads averages."""
BLOCK_ELEMENTS = 2**22  # weights in memory at once
_SIDE = 44  # pixels of a thumbnail's side; a place has at least one pixel
_UNIT = "attention / uniform; higher is clipped"

Grid = tuple[int, int]


class Looks(NamedTuple):
    """The attention of each place in a layer, the mean over its heads.

    weights: [batch, places, places], 1 = uniform attention over all keys.
    prefix: [batch, places], the share of class and register tokens.
    """

    layer: str
    num_heads: int
    weights: Annotated[Tensor, "batch places places"]
    prefix: Annotated[Tensor, "batch places"]


class Heads(NamedTuple):
    """The attention of the tokens from which the answer is read, head by head.

    weights: [batch, heads, places], 1 = uniform attention over all keys.
    entropy: [batch, heads], −Σ a log a / log(keys).
    share, receiver: [batch, heads], the largest share that a token gets, and its number.
    """

    layer: str
    weights: Annotated[Tensor, "batch heads places"]
    entropy: Annotated[Tensor, "batch heads"]
    share: Annotated[Tensor, "batch heads"]
    receiver: Annotated[Tensor, "batch heads", int]


class Attention(NamedTuple):
    """The attention on all images of an explanation, on a grid of at most `MOST_CELLS` places.

    tokens: the model's own grid, by which its tokens are numbered.
    reads: which tokens' attention the heads show, in words.
    class_token: number of the class token, if the answer is read only from it.
    """

    grid: Grid
    tokens: TokenGrid
    looks: list[Looks]
    heads: list[Heads]
    reads: str
    class_token: int | None


class Without(NamedTuple):
    """The target's probability without each single place of the grid.

    whole: [batch], the probability with all places.
    kind: how a place is removed, in words.
    """

    grid: Grid
    p: Annotated[Tensor, "batch places"]
    whole: Annotated[Tensor, "batch"]
    kind: str


def attention_of(explanation: Explanation) -> Attention:
    """Return the attention on the images of an explanation, in one pass.

    Raises:
        ValueError: the model has no attention between the tokens of a whole image.
    """
    question = _question(explanation)
    with looking(question.model):
        chain = watch(question, "attention")
        grid = cell_grid(*chain.grid[:2])
        whole = [step for step in chain.steps if step.call.num_queries == step.num_tokens]
        looks = [_looks(step, chain, grid) for step in _some(whole)]
        rows = chain.rows_read()
        heads = [
            _heads(step, read, chain, grid) for step, read in zip(chain.steps, rows, strict=True)
        ]
    return Attention(grid, chain.grid, looks, heads, *_reader(chain))


def without_each(
    explanation: Explanation, grid: Grid | None = None, batch_size: int = 64
) -> Without:
    """Return the target's probability without each place, with a forward for each.

    A place is removed by masking its tokens if the model allows it, else by the mean colour.

    Args:
        grid: grid of the places; None: the model's patches, or coarser, with at most 256 places.
    """
    question = _question(explanation)
    if grid is None:
        grid = cell_grid(*removal_grid(question, explanation.map))
    with looking(question.model), torch.no_grad():
        question.ask()
        try:
            kind, answer = "mask", removal("mask", question, grid)
        except NotAvailableError:
            kind, answer = "mean", removal("mean", question, grid)
        without, places = of_images(question, answer), grid[0] * grid[1]
        doing = f"leaving one patch out, {REMOVALS[kind]}"
        _, p, _ = answers_without_each(question, without, places, batch_size, doing)
    return Without(grid, p[1:].T, p[0], REMOVALS[kind])


def patch_data(without: Without, image: int, target: str) -> dict[str, Any]:
    """Return the data on p without each patch for the page's script."""
    rows, columns = without.grid
    return {
        "rows": rows,
        "columns": columns,
        "target": target,
        "kind": without.kind,
        "whole": round(float(without.whole[image]), 4),
        "without": [round(p, 4) for p in without.p[image].tolist()],
    }


def scale_of_weights(weights: Sequence[Tensor]) -> Scale:
    """Return a scale from 0 to the 99th percentile, but at least to twice uniform attention.

    The maximum would leave most places dark if nearly all tokens look at a few keys.
    """
    values = torch.cat([one.flatten() for one in weights]).sort().values
    return Scale(0.0, max(2.0, float(values[int(0.99 * (len(values) - 1))])))


def looks_data(attention: Attention, image: int) -> dict[str, Any]:
    """Return the data on what each patch looks at: the scale, and for each layer an image with a
    tile for each patch, and the numbers in its texts."""
    scale = scale_of_weights([one.weights[image] for one in attention.looks])
    layers = []
    for one in attention.looks:
        weights = one.weights[image]
        times, most = weights.max(dim=1)
        tiles = weights.unflatten(0, attention.grid).unflatten(2, attention.grid)
        shares = one.prefix[image].tolist() if attention.tokens.num_others else []
        layers.append(
            {
                "layer": one.layer or "(itself)",
                "heads": one.num_heads,
                "sheet": map_uri(_sheet(tiles), scale),
                "most": most.tolist(),
                "times": [round(value, 1) for value in times.tolist()],
                "prefix": [round(100 * value) for value in shares],
            }
        )
    return {"layers": layers, "bar": colour_bar(scale, _UNIT)}


def heads_data(attention: Attention, image: int) -> dict[str, Any]:
    """Return the data of a row of thumbnails for each layer: the attention of each head as a tile
    of one image, its entropy, and whether one token gets at least half of it."""
    rows, columns = attention.grid
    layers = attention.heads
    most = max(one.weights.shape[1] for one in layers)
    scale = scale_of_weights([one.weights[image] for one in layers])
    sheet = torch.zeros(len(layers), most, rows, columns)
    tiles = []
    for number, one in enumerate(layers):
        name = one.layer or "(itself)"
        sheet[number, : one.weights.shape[1]] = one.weights[image].unflatten(1, attention.grid)
        of_image = (one.entropy[image], one.share[image], one.receiver[image])
        for head, (entropy, share, token) in enumerate(
            zip(*map(Tensor.tolist, of_image), strict=True)
        ):
            gets = f"{_token(attention, token)} gets most, {100 * share:.0f} %"
            tiles.append(
                {
                    "layer": number,
                    "head": head,
                    "entropy": round(entropy, 3),
                    "sink": share >= SINK,
                    "says": f"{name}, head {head}: entropy {entropy:.2f}; {gets}.",
                }
            )
    each = max(1, round(_SIDE / max(rows, columns)))
    return {
        "layers": [one.layer or "(itself)" for one in layers],
        "heads": most,
        "wide": each * columns,
        "high": each * rows,
        "sheet": map_uri(_sheet(sheet), scale),
        "tiles": tiles,
        "bar": colour_bar(scale, _UNIT),
        "reads": attention.reads,
        "sink": f"{100 * SINK:.0f} %",
    }


def _token(attention: Attention, number: int) -> str:
    tokens = attention.tokens
    row, column = divmod(number - tokens.num_prefix_tokens, tokens.columns)
    if 0 <= row < tokens.rows:
        return f"the patch at row {row}, column {column}"
    is_class_token = number == attention.class_token
    return "the class token" if is_class_token else f"class or register token {number}"


def _sheet(tiles: Tensor) -> Tensor:
    """Return tiles [down, across, rows, columns] as one map."""
    return tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _question(explanation: Explanation) -> Question:
    """Return the explanation's question, on the grid of its tokens if it has some."""
    grid: dict[str, Any] = {}
    if explanation.tokens is not None:
        rows, columns = explanation.map.shape[1:]
        grid = {"grid": (rows, columns), "num_prefix_tokens": explanation.num_prefix_tokens}
    return Question(explanation.model, explanation.images, explanation.target, **grid)


def cell_grid(rows: int, columns: int) -> Grid:
    """Return the grid, or a coarser one with at most `MOST_CELLS` places."""
    for side in range(1, max(rows, columns) + 1):
        coarse = -(-rows // side), -(-columns // side)
        if coarse[0] * coarse[1] <= MOST_CELLS:
            return coarse
    raise AssertionError


def _some(steps: list[Step]) -> list[Step]:
    """Return the first, the middle and the last step, as many as a page shows."""
    if len(steps) <= MOST_LAYERS:
        return steps
    return [steps[0], steps[len(steps) // 2], steps[-1]]


def _looks(step: Step, chain: Chain, grid: Grid) -> Looks:
    call, of_model = step.call, chain.grid[:2]
    rows = chain.grid.patches(torch.arange(call.num_queries, device=call.query.device), dim=0)
    block = max(1, BLOCK_ELEMENTS // (len(call.query) * call.num_heads * call.num_keys))
    found = [call.weights(rows=some).mean(dim=1) for some in rows.split(block)]
    weights = torch.cat(found, dim=1).float()
    patches = _pooled(chain.grid.patches(weights, dim=2), of_model, grid) * call.num_keys
    patches = _pooled(patches.transpose(1, 2), of_model, grid).transpose(1, 2)
    shares = _pooled(chain.grid.others(weights, dim=2).sum(dim=2)[:, None], of_model, grid)[:, 0]
    return Looks(call.layer, call.num_heads, patches, shares)


def _heads(step: Step, read: Tensor, chain: Chain, grid: Grid) -> Heads:
    """Return each head's mean attention over at most `MOST_ROWS` of the queries that are read."""
    call = step.call
    queries = read.any(dim=0).nonzero()[:, 0]
    chosen = torch.linspace(0, len(queries) - 1, min(MOST_ROWS, len(queries))).round().long()
    weights = call.weights(rows=queries[chosen.to(queries.device)]).double()
    entropy = torch.special.entr(weights).sum(dim=-1).mean(dim=2) / log(max(2, call.num_keys))
    # if there are fewer keys than tokens, they are the last ones
    received = F.pad(weights.mean(dim=2), (step.num_tokens - call.num_keys, 0)).float()
    patches = _pooled(chain.grid.patches(received, dim=2), chain.grid[:2], grid)
    share, receiver = received.max(dim=-1)
    return Heads(call.layer, patches * call.num_keys, entropy.float(), share, receiver)


def _reader(chain: Chain) -> tuple[str, int | None]:
    """Return which tokens' attention the heads show, in words, and the number of the class token if
    the answer is read only from it."""
    last, grid = chain.steps[-1], chain.grid
    if last.rows is None:
        return "the learned queries look at, and in layers below all tokens, on average", None
    read = last.rows[chain.start[0] > 0]
    patch = read - grid.num_prefix_tokens
    is_patch = (patch >= 0) & (patch < grid.rows * grid.columns)
    if len(read) == 1 and not is_patch:
        return "the class token looks at", int(read)
    if is_patch.all():
        return "the patches look at, on average", None
    return f"the {len(read)} tokens look at that the answer is read from, on average", None


def _pooled(values: Tensor, fine: Grid, grid: Grid) -> Tensor:
    """Average values on a fine grid, the last dimension, within the places of a coarser grid."""
    if fine == grid:
        return values
    return F.adaptive_avg_pool2d(values.unflatten(-1, fine), grid).flatten(-2)
