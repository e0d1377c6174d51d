"""What a page shows of attention: what each patch looks at, and what each head does."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.interpret.explanation import Explanation
from attnkit.interpret.layer_table import MOST_ROWS
from attnkit.interpret.methods.flow import Step
from attnkit.interpret.methods.question import Question, looking
from attnkit.interpret.methods.tokens import Chain, watch

MOST_CELLS = 256
"""Places of a page's grid: what one looks at is as many numbers for each."""
MOST_LAYERS = 3
"""Of which the page holds what every patch looks at; 196 patches are 40 kB a layer and image."""
BLOCK_ELEMENTS = 2**22  # weights held at once

Grid = tuple[int, int]


class Looks(NamedTuple):
    """What each place looks at in a layer, the mean over its heads.

    weights: [batch, places, places], 1 = uniform attention over all keys.
    prefix: [batch, places], the share of class and register tokens.
    """

    layer: str
    num_heads: int
    weights: Annotated[Tensor, "batch places places"]
    prefix: Annotated[Tensor, "batch places"]


class Heads(NamedTuple):
    """What is looked at by the tokens that the answer is read from, head by head.

    weights: [batch, heads, places], 1 = uniform attention over all keys.
    entropy: [batch, heads], −Σ a log a / log(keys).
    share, receiver: [batch, heads], what the token gets that gets most, and which it is.
    """

    layer: str
    weights: Annotated[Tensor, "batch heads places"]
    entropy: Annotated[Tensor, "batch heads"]
    share: Annotated[Tensor, "batch heads"]
    receiver: Annotated[Tensor, "batch heads", int]


class Attention(NamedTuple):
    """Of all images of an explanation, on a grid of at most `MOST_CELLS` places.

    columns: of the model's own grid, by which tokens are numbered.
    """

    grid: Grid
    columns: int
    num_prefix_tokens: int
    looks: list[Looks]
    heads: list[Heads]


def attention_of(explanation: Explanation) -> Attention:
    """One pass over the images of an explanation.

    Raises:
        ValueError: the model has no attention between the tokens of a whole image.
    """
    model, images = explanation.model, explanation.images
    prefix = None if explanation.tokens is None else explanation.num_prefix_tokens
    question = Question(model, images, explanation.target, None, own_grid(explanation), prefix)
    with looking(model):
        chain = watch(question, "attention")
        of_model = chain.grid.rows, chain.grid.columns
        grid = cell_grid(*of_model)
        whole = [step for step in chain.steps if step.call.num_queries == step.num_tokens]
        looks = [_looks(step, chain, grid) for step in _some(whole)]
        rows = chain.rows_read()
        heads = [
            _heads(step, read, chain, grid) for step, read in zip(chain.steps, rows, strict=True)
        ]
    return Attention(grid, of_model[1], chain.grid.num_prefix_tokens, looks, heads)


def own_grid(explanation: Explanation) -> Grid | None:
    """Rows and columns of the model's patches, where the explanation is of them."""
    rows, columns = explanation.map.shape[1:]
    return None if explanation.tokens is None else (rows, columns)


def cell_grid(rows: int, columns: int) -> Grid:
    """The grid itself, or one so much coarser that it has at most `MOST_CELLS` places."""
    for side in range(1, max(rows, columns) + 1):
        coarse = -(-rows // side), -(-columns // side)
        if coarse[0] * coarse[1] <= MOST_CELLS:
            return coarse
    raise AssertionError


def _some(steps: list[Step]) -> list[Step]:
    """The last, the first and one between: what a page has room for."""
    if len(steps) <= MOST_LAYERS:
        return steps
    return [steps[0], steps[len(steps) // 2], steps[-1]]


def _looks(step: Step, chain: Chain, grid: Grid) -> Looks:
    call = step.call
    of_model = chain.grid.rows, chain.grid.columns
    rows = chain.grid.patches(torch.arange(call.num_queries, device=call.query.device), dim=0)
    block = max(1, BLOCK_ELEMENTS // (len(call.query) * call.num_heads * call.num_keys))
    found = [call.weights(rows=some).mean(dim=1) for some in rows.split(block)]
    weights = torch.cat(found, dim=1).float()
    patches = _pooled(chain.grid.patches(weights, dim=2), of_model, grid) * call.num_keys
    patches = _pooled(patches.transpose(1, 2), of_model, grid).transpose(1, 2)
    shares = _pooled(chain.grid.others(weights, dim=2).sum(dim=2)[:, None], of_model, grid)[:, 0]
    return Looks(call.layer, call.num_heads, patches, shares)


def _heads(step: Step, read: Tensor, chain: Chain, grid: Grid) -> Heads:
    """As `layer_table`, image by image: of the queries that are read at most `MOST_ROWS`."""
    call = step.call
    queries = read.any(dim=0).nonzero()[:, 0]
    chosen = torch.linspace(0, len(queries) - 1, min(MOST_ROWS, len(queries))).round().long()
    weights = call.weights(rows=queries[chosen.to(queries.device)]).float()
    entropy = torch.special.entr(weights).sum(dim=-1).mean(dim=2)
    received = weights.mean(dim=2)  # [batch, heads, keys]
    first = step.num_tokens - call.num_keys
    share, receiver = received.max(dim=-1)
    start = max(0, chain.grid.num_prefix_tokens - first)
    patches = received[:, :, start : start + chain.grid.rows * chain.grid.columns]
    return Heads(
        call.layer,
        _pooled(patches, (chain.grid.rows, chain.grid.columns), grid) * call.num_keys,
        entropy / torch.tensor(max(2, call.num_keys)).log(),
        share,
        first + receiver,
    )


def _pooled(values: Tensor, fine: Grid, grid: Grid) -> Tensor:
    """The mean of what falls into each place, over the last dimension."""
    if fine == grid:
        return values
    return F.adaptive_avg_pool2d(values.unflatten(-1, fine), grid).flatten(-2)
