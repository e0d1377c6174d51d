"""The additive score and its kernel: Σ_d vector_d · activation(query_d + key_d), tile by tile.

Plain code holds a queries × keys × dim tensor, and several in the backward. This kernel holds such
a tensor for one tile at a time, in a buffer that stays in the processor's cache, and the backward
fills it again. It is registered as an operator, which torch.compile and torch.export do not trace.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from attnkit.core.arguments import at_least, choice
from attnkit.core.operators.cpu import has_tangent
from attnkit.core.operators.precision import no_autocast
from attnkit.core.scores.kinds import Score, check_fit

Activation = Literal["tanh", "leaky_relu"]

# Elements of the buffer: 8 MB in float32 on the CPU; on other devices enough to keep a GPU busy.
TILE_ELEMENTS = {"cpu": 2**21, "other": 2**24}


@dataclass(frozen=True, eq=False)
class Additive(Score):
    """score(q, k) = vᵀ activation(q + k).

    With tanh it is Bahdanau's score, vᵀ tanh(W_q x + W_k y) (Bahdanau et al., Neural Machine
    Translation by Jointly Learning to Align and Translate, 2015); with LeakyReLU it is the score of
    GATv2 (Brody et al. 2022). The block that makes the queries and keys has the projections W_q and
    W_k.

    vector: v, one vector for all heads or one for each.
    activation: "tanh" or "leaky_relu".
    negative_slope: the slope of "leaky_relu", at least 0; None: 0.2. "tanh" has none.
    """

    vector: Annotated[Tensor, "*heads head_dim"]
    by_head = "vector", 2
    activation: Activation = "tanh"
    negative_slope: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        choice(get_args(Activation), activation=self.activation)
        if self.activation == "leaky_relu" and self.negative_slope is None:
            object.__setattr__(self, "negative_slope", 0.2)
        if self.negative_slope is None:
            return
        if self.activation == "tanh":
            raise ValueError(
                f"negative_slope: only the activation 'leaky_relu' has one, "
                f"got {self.negative_slope} with 'tanh'"
            )
        at_least(0, negative_slope=self.negative_slope)

    def check(self, query: Tensor, key: Tensor) -> None:
        super().check(query, key)
        check_fit("vector", self.vector, (query.shape[1], query.shape[3]), query)

    def uncapped(self, query: Tensor, key: Tensor) -> Tensor:
        return additive_definition(query, key, self.vector, self.negative_slope)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        # our operator is unknown to exported programs and has no rules for torch.func and forward
        # mode
        if (
            torch.compiler.is_exporting()
            or torch._C._are_functorch_transforms_active()
            or has_tangent((query, key, self.vector))
        ):
            return self.definition(query, key)
        vector = self.vector.expand(*query.shape[:2], -1)
        scores = additive_scores(
            query.flatten(0, 1), key.flatten(0, 1), vector.flatten(0, 1), self.negative_slope
        )
        return self.cap(scores.unflatten(0, query.shape[:2]))


pytree.register_dataclass(Additive)


class _Activation(NamedTuple):
    """An activation in the form offset + gain · f(scale · x), with its derivative in the form
    derivative_offset + derivative_gain · g(f(scale · x)).

    Both f and g work in place and in one pass.
    """

    scale: float
    f: Callable[[Tensor], Tensor]
    offset: float
    gain: float
    g: Callable[[Tensor], Tensor]
    derivative_offset: float
    derivative_gain: float


def _activation(negative_slope: float | None) -> _Activation:
    if negative_slope is None:
        # tanh(x) = 2 s − 1 with s = sigmoid(2x), several times as fast, and tanh′(x) = 4 (s − s²)
        return _Activation(2, torch.sigmoid_, -1, 2, lambda s: s.addcmul_(s, s, value=-1), 0, 4)
    # the slope is at least 0, so the activation is positive exactly where its argument is
    return _Activation(
        1,
        lambda x: F.leaky_relu_(x, negative_slope),
        0,
        1,
        lambda y: y.gt_(0),
        negative_slope,
        1 - negative_slope,
    )


def _as_columns(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return [batch, dim, queries, 1] and [batch, dim, 1, keys], whose sum is the argument."""
    return (scale * query).mT.contiguous()[..., None], (scale * key).mT.contiguous()[:, :, None]


def _tiles(query: Tensor, key: Tensor) -> Iterator[tuple[Tensor, tuple[slice, slice, slice]]]:
    """Yield the buffer [items, dim, rows, columns] of each tile, and the slices of the tile."""
    batch, dim, num_queries, _ = query.shape
    num_keys = key.shape[3]
    elements = TILE_ELEMENTS["cpu" if query.is_cpu else "other"]
    columns = min(num_keys, max(1, elements // dim))
    rows = min(num_queries, max(1, elements // (dim * columns)))
    items = max(1, min(batch, elements // (dim * columns * rows)))
    buffer = query.new_empty(items * dim * rows * columns)
    for item in range(0, batch, items):
        for row in range(0, num_queries, rows):
            for column in range(0, num_keys, columns):
                shape = (
                    min(items, batch - item),
                    dim,
                    min(rows, num_queries - row),
                    min(columns, num_keys - column),
                )
                size = shape[0] * shape[1] * shape[2] * shape[3]
                where = (
                    slice(item, item + items),
                    slice(row, row + rows),
                    slice(column, column + columns),
                )
                yield buffer[:size].view(shape), where


def additive_definition(
    query: Tensor, key: Tensor, vector: Tensor, negative_slope: float | None
) -> Tensor:
    """Compute the scores of query [..., queries, dim], key [..., keys, dim] and vector [..., dim]
    plainly, with a tensor [..., queries, keys, dim]."""
    pairs = query[..., :, None, :] + key[..., None, :, :]
    pairs = pairs.tanh() if negative_slope is None else F.leaky_relu(pairs, negative_slope)
    return (pairs * vector[..., None, None, :]).sum(dim=-1)


@torch.library.custom_op("attnkit::additive_scores", mutates_args=())
def additive_scores(
    query: Tensor, key: Tensor, vector: Tensor, negative_slope: float | None
) -> Tensor:
    """Compute score_ij = Σ_d vector_d · activation(query_id + key_jd).

    The activation is tanh (Bahdanau et al. 2015), or with a `negative_slope` LeakyReLU, as in
    GATv2 (Brody et al. 2022).

    Args:
        query: [batch, queries, dim], float32 or float64; all tensors have the same dtype.
        key: [batch, keys, dim].
        vector: [batch, dim].
        negative_slope: at least 0; None for tanh.

    Returns:
        [batch, queries, keys].
    """
    scores = query.new_empty(query.shape[0], query.shape[1], key.shape[1])
    activation = _activation(negative_slope)
    query, key = _as_columns(query, key, activation.scale)
    with no_autocast(query):
        for buffer, (item, row, column) in _tiles(query, key):
            activation.f(torch.add(query[item, :, row], key[item, ..., column], out=buffer))
            sums = vector[item, None] @ buffer.flatten(2)
            scores[item, row, column] = sums.view(-1, *buffer.shape[2:])
    constant = activation.offset * vector.sum(dim=-1)
    return scores.mul_(activation.gain).add_(constant[:, None, None])


@torch.library.custom_op("attnkit::additive_scores_backward", mutates_args=())
def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, vector: Tensor, negative_slope: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and vector from the gradient of the scores."""
    sums = gradient.sum(dim=2), gradient.sum(dim=1)
    activation = _activation(negative_slope)
    query, key = _as_columns(query, key, activation.scale)
    of_query, of_key = torch.zeros_like(query[..., 0]), torch.zeros_like(key[:, :, 0])
    of_vector = vector.new_zeros(vector.shape)
    with no_autocast(query):
        for buffer, (item, row, column) in _tiles(query, key):
            block = gradient[item, row, column].contiguous()
            activation.f(torch.add(query[item, :, row], key[item, ..., column], out=buffer))
            of_vector[item] += (buffer.flatten(2) @ block.flatten(1)[..., None])[..., 0]
            activation.g(buffer).mul_(block[:, None])
            of_query[item, :, row] += buffer.sum(dim=3)
            of_key[item, :, column] += buffer.sum(dim=2)
    of_vector = activation.gain * of_vector + activation.offset * sums[0].sum(dim=1)[:, None]
    of_query, of_key = (
        # contiguous, as `register_fake` declares
        (vector[:, None] * (activation.derivative_gain * of.mT + constant)).contiguous()
        for of, constant in (
            (of_query, activation.derivative_offset * sums[0][..., None]),
            (of_key, activation.derivative_offset * sums[1][..., None]),
        )
    )
    return of_query, of_key, of_vector


@additive_scores.register_fake
def _(query, key, vector, negative_slope):
    return query.new_empty(query.shape[0], query.shape[1], key.shape[1])


@_backward.register_fake
def _(gradient, query, key, vector, negative_slope):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, vector))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.negative_slope = inputs
    ctx.save_for_backward(*tensors)


def _derivative(ctx, gradient):
    # read once: a checkpoint does not give saved tensors a second time
    query, key, vector = tensors = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph: the operator of the backward has no derivative
        scores = additive_definition(query, key, vector, ctx.negative_slope)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        found = iter(torch.autograd.grad(scores, wanted, gradient, create_graph=True))
        return *(next(found) if tensor.requires_grad else None for tensor in tensors), None
    return *_backward(gradient, *tensors, ctx.negative_slope), None


additive_scores.register_autograd(_derivative, setup_context=_setup_context)
