"""Attention with a memory of fixed size, in time and memory linear in the tokens: linear attention
and the delta rule. Within a chunk of tokens both are batched matrix products.

Linear attention sums over the keys first:

    output_i = φ(q_i) Σ_j φ(k_j)ᵀ v_j / φ(q_i) Σ_j φ(k_j)ᵀ

The sums over the keys are a matrix of head_dim × value_dim and a vector. They are held side by side
as one memory, since the vector is the sum for a value of 1. Causal attention has such a memory for
each query; it is kept for each chunk of tokens, and the chunk itself adds a small matrix of
weights.

The delta rule corrects the memory with each token. Within a chunk, the write of token t depends on
the writes of the tokens before it. One triangular system gives all of them (the UT transform of
Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, 2024), so
that only chunks, not tokens, are sequential.

Long sequences are computed in segments, which pass on the memory; the backward recomputes them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import and_
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attnkit.core.arguments import at_least, floating
from attnkit.core.inputs import Inputs, check_inputs
from attnkit.core.kernels.base import (
    TRACED_PARTS,
    Backend,
    are_known,
    dropout_reasons,
    empty_reasons,
)
from attnkit.core.masks.sequences import Causal, Packed, Padding
from attnkit.core.normalizers import DeltaRule, Linear
from attnkit.core.operators.precision import no_autocast, wide

Features = Callable[[Tensor], Tensor]

CHUNK = 64  # tokens, as a head usually has dimensions: both products then cost the same

# Numbers in one tensor of a segment: few enough for the CPU's cache; elsewhere enough to keep a GPU
# busy.
SEGMENT_ELEMENTS = {"cpu": 2**18, "other": 2**24}


class LinearKernel(Backend):
    """The kernel for `Linear`, with `Causal`, `Padding` and `Packed` or without a mask.

    Sums are computed in float32 (float64 if the inputs are). Their terms are positive weights times
    values, and no sum is computed as the difference of two long sums.
    """

    name = "linear"
    normalizers = (Linear,)
    has_all_derivatives = True

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        yield from empty_reasons(inputs)
        yield from dropout_reasons(inputs)
        packed = [mask for mask in inputs.masks if isinstance(mask, Packed)]
        for mask in inputs.masks:
            if mask not in packed[:1] and not isinstance(mask, Causal | Padding):
                yield f"needs no mask but Causal, Padding and one Packed, got {type(mask).__name__}"
            elif packed and isinstance(mask, Padding):
                yield "needs no Padding beside Packed"
        if packed and torch.compiler.is_compiling():
            yield "reads lengths of Packed, which have no values while torch.compile traces"
        sizes = inputs.num_queries, inputs.num_keys
        if any(isinstance(mask, Causal) for mask in inputs.masks) and not (
            are_known(*sizes) or statically_known_true(sizes[0] == sizes[1])
        ):
            yield "needs numbers of queries and keys that are known or equal in an exported program"

    def compute(self, inputs: Inputs) -> Tensor:
        packed = next((mask for mask in inputs.masks if isinstance(mask, Packed)), None)
        if packed is None:
            return self._of_sequence(inputs)
        inside = [mask for mask in inputs.masks if mask is not packed]
        mask = reduce(and_, inside) if inside else None
        lengths, key_lengths = packed.known_lengths
        # the backward of split is one concatenation; each slice would fill a whole gradient
        pieces = zip(
            inputs.query.split(lengths, dim=2),
            inputs.key.split(key_lengths, dim=2),
            inputs.value.split(key_lengths, dim=2),
            strict=True,
        )
        outputs = [
            self._of_sequence(replace(inputs, query=query, key=key, value=value, mask=mask))
            for query, key, value in pieces
        ]
        return torch.cat(outputs, dim=2)

    def _of_sequence(self, inputs: Inputs) -> Tensor:
        assert isinstance(inputs.normalizer, Linear)
        query, key, value = inputs.query, inputs.key, inputs.value
        dtype = wide(query.dtype)
        size = segment_size(query, CHUNK)
        dead, prefix, aligned = _alignment(inputs)
        sizes = [prefix, aligned, inputs.num_keys - prefix - aligned]
        # keys that all queries see, keys that are seen from their own query on, and unseen keys
        seen_by_all, at_side, _ = zip(*(t.split(sizes, 2) for t in _keys(inputs)), strict=True)
        nowhere, beside, after = query.split([dead, aligned, query.shape[2] - dead - aligned], 2)
        state = key.new_zeros(*key.shape[:2], key.shape[3], value.shape[3] + 1, dtype=dtype)
        features = inputs.normalizer.features
        with no_autocast(query):
            _, state = scan(partial(_write, features), state, seen_by_all, size)
            causal = partial(_read_and_write, features)
            outputs, state = scan(causal, state, (beside, *at_side), size)
            others, _ = scan(partial(_read, features), state, (after,), size)
        zeros = value.new_zeros(*nowhere.shape[:3], value.shape[3])
        return torch.cat([zeros, *outputs, *others], dim=2)


def _alignment(inputs: Inputs) -> tuple[int, int, int]:
    """Return three numbers: of queries that see nothing, of keys that all other queries see, and of
    queries that then see one key more each. Later queries see as much as the last of these."""
    if inputs.mask is None:
        return 0, inputs.num_keys, 0
    _, last = inputs.mask.band(inputs.num_queries, inputs.num_keys)
    if last is None:
        return 0, inputs.num_keys, 0
    dead, prefix = min(inputs.num_queries, max(0, -last)), min(inputs.num_keys, max(0, last))
    return dead, prefix, min(inputs.num_queries - dead, inputs.num_keys - prefix)


def _keys(inputs: Inputs) -> tuple[Tensor, ...]:
    """Return key, value, and if there is padding which keys are not padding."""
    is_real = inputs.real_keys()
    return inputs.key, inputs.value, *(() if is_real is None else (is_real,))


def _write(
    features: Features, state: Tensor, key: Tensor, value: Tensor, *real: Tensor
) -> tuple[None, Tensor]:
    key, value = _featured(features, state, key, *real), _with_ones(value, state)
    return None, state + key.transpose(-2, -1) @ value


def _read(features: Features, state: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    tokens = query.shape[2]
    rows = _featured(features, state, query).unflatten(1, (state.shape[1], -1))
    sums = rows.flatten(2, 3) @ state
    return _normalized(sums.unflatten(2, (-1, tokens)).flatten(1, 2), query.dtype), state


def _read_and_write(
    features: Features, state: Tensor, query: Tensor, key: Tensor, value: Tensor, *real: Tensor
) -> tuple[Tensor, Tensor]:
    """Let each query read the keys before its chunk, and those of the chunk up to itself."""
    tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    size = size_of_chunk(CHUNK, tokens)
    q, k, v = (
        in_chunks(tensor, size)
        for tensor in (
            _featured(features, state, query),
            _featured(features, state, key, *real),
            _with_ones(value, state),
        )
    )
    # the query heads of a group beside each other: [batch, kv_heads, chunks, groups · size, dim]
    q = q.unflatten(1, (-1, groups)).transpose(2, 3).flatten(3, 4)
    weights = (q @ k.transpose(-2, -1)).unflatten(3, (groups, size)).tril().flatten(3, 4)
    states = torch.cat([state[:, :, None], k.transpose(-2, -1) @ v], dim=2).cumsum(dim=2)
    sums = weights @ v + q @ states[:, :, :-1]
    sums = sums.unflatten(3, (groups, size)).transpose(2, 3).flatten(1, 2).flatten(2, 3)
    return _normalized(sums[:, :, :tokens], query.dtype), states[:, :, -1]


def _featured(features: Features, state: Tensor, tokens: Tensor, *real: Tensor) -> Tensor:
    """Return φ in the precision of the state, 0 for padded keys."""
    featured = features(tokens.to(state.dtype))
    return featured.masked_fill(~real[0], 0.0) if real else featured


def _with_ones(value: Tensor, state: Tensor) -> Tensor:
    return F.pad(value.to(state.dtype), (0, 1), value=1.0)


def _normalized(sums: Tensor, dtype: torch.dtype) -> Tensor:
    total = sums[..., -1:]
    return (sums[..., :-1] / total.masked_fill(total == 0, 1.0)).to(dtype)


def delta_rule(
    query: Annotated[Tensor, "batch heads tokens head_dim"],
    key: Annotated[Tensor, "batch kv_heads tokens head_dim"],
    value: Annotated[Tensor, "batch kv_heads tokens value_dim"],
    beta: Annotated[Tensor, "#batch #heads tokens"],
    state: Annotated[Tensor, "batch heads head_dim value_dim"] | None = None,
    chunk_size: int = CHUNK,
) -> tuple[
    Annotated[Tensor, "batch heads tokens value_dim"],
    Annotated[Tensor, "batch heads head_dim value_dim"],
]:
    """Write values into a memory by the delta rule, and read it after each (Schlag et al., 2021).

        S_t = S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ k_t)ᵀ,   output_t = S_tᵀ q_t

    This is the plain recurrence: queries and keys are neither scaled nor normalized (Yang et al.
    2024 scale queries by 1/√head_dim). After a write with β_t = 1 and |k_t| = 1, reading at k_t
    gives v_t. The memory stays bounded where 0 ≤ β_t |k_t|² ≤ 2. `attend` with `DeltaRule(beta)`
    applies it to silu(query) and silu(key) at unit length.

    To continue a sequence, token by token or many at a time, pass the returned state:

        output, state = attnkit.delta_rule(query, key, value, beta)
        next_output, state = attnkit.delta_rule(next_query, next_key, next_value, next_beta, state)

    Time is linear in the tokens; the backward computes the memories of chunks again instead of
    keeping them. It computes in float32 (float64 if the inputs are).

    Args:
        query, key, value: kv_heads divides heads, as in `attend`.
        beta: for each token, the share of the old content that it replaces.
        state: the memory S_0; zeros if None.
        chunk_size: the tokens of one triangular system; changes speed, not the result.

    Returns:
        The output, in the dtype of the query; and the last memory, in float32 (float64 if the
        inputs are).

    Raises:
        ValueError, TypeError: an argument has a wrong value, shape or type.
    """
    at_least(1, chunk_size=chunk_size)
    rule = DeltaRule(beta)
    inputs = check_inputs(query, key, value, mask=Causal("top_left"), normalizer=rule)
    if state is not None:
        _check_state(inputs, state)
    return _delta_rule(inputs, rule.written(inputs), state, chunk_size)


class DeltaRuleKernel(Backend):
    """The kernel for `DeltaRule`, which is causal, in time linear in the tokens."""

    name = "delta_rule"
    normalizers = (DeltaRule,)
    has_all_derivatives = True

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        yield from empty_reasons(inputs)
        yield from dropout_reasons(inputs)

    def compute(self, inputs: Inputs) -> Tensor:
        rule = inputs.normalizer
        assert isinstance(rule, DeltaRule)
        output, _ = _delta_rule(inputs, rule.written(inputs), features=rule.features)
        return output


def _delta_rule(
    inputs: Inputs,
    beta: Tensor,
    state: Tensor | None = None,
    chunk_size: int = CHUNK,
    features: Features = lambda tokens: tokens,
) -> tuple[Tensor, Tensor]:
    query, key, value = inputs.query, inputs.key, inputs.value
    dtype = wide(query.dtype)
    if state is None:
        state = query.new_zeros(*query.shape[:2], query.shape[3], value.shape[3])
    step = partial(_corrected, features, chunk_size)
    with no_autocast(query):
        outputs, state = scan(
            step, state.to(dtype), (query, key, value, beta), segment_size(query, chunk_size)
        )
    if not outputs:
        return value.new_zeros(*query.shape[:3], value.shape[3]), state
    return torch.cat(outputs, dim=2), state


def _corrected(
    features: Features,
    chunk_size: int,
    state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the output of a segment, and the memory after it."""
    tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    q, k, v = (tensor.to(state.dtype) for tensor in (query, key, value))
    # keys and values are repeated here, for one segment only
    heads = features(q), *(t.repeat_interleave(groups, 1) for t in (features(k), v))
    chunked = (*heads, beta.to(state.dtype)[..., None])
    q, k, v, b = (in_chunks(tensor, size_of_chunk(chunk_size, tokens)) for tensor in chunked)
    # a chunk that meets the memory S writes u_t = β_t (v_t − Sᵀ k_t − Σ_{s<t} u_s (k_s·k_t)):
    # u = own − seen S, whose two parts need no S
    overlap = b * (k @ k.transpose(-2, -1))
    # solve_triangular reads only the part of the overlap below its diagonal
    solved = torch.linalg.solve_triangular(
        overlap, b * torch.cat([v, k], dim=-1), upper=False, unitriangular=True
    )
    own, seen = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    states, writes = [], []
    chunks = zip(own.unbind(2), seen.unbind(2), k.transpose(-2, -1).unbind(2), strict=True)
    for own_, seen_, key_ in chunks:
        states.append(state)
        writes.append(own_ - seen_ @ state)
        state = state + key_ @ writes[-1]
    before, written = torch.stack(states, dim=2), torch.stack(writes, dim=2)
    output = q @ before + (q @ k.transpose(-2, -1)).tril() @ written
    return output.flatten(2, 3)[:, :, :tokens].to(query.dtype), state


def _check_state(inputs: Inputs, state: Tensor) -> None:
    expected = [*inputs.query.shape[:2], inputs.query.shape[3], inputs.value.shape[3]]
    floating("state", state, inputs.query)
    if list(state.shape) != expected:
        raise ValueError(
            f"state: expected [batch, heads, head_dim, value_dim] = {expected}, "
            f"got {list(state.shape)}"
        )


def scan(
    step: Callable[..., tuple[Any, Tensor]], state: Tensor, tensors: Sequence[Tensor], size: int
) -> tuple[list[Any], Tensor]:
    """Apply the step, a function (state, a segment of each tensor) -> (the segment's result, the
    next state), to segments of `size` tokens; return the results and the last state.

    The tensors are [batch, heads, tokens, ...]. Beside them and the results, memory holds one
    segment and the states between segments: the backward takes each step again (Chen et al.,
    Training Deep Nets with Sublinear Memory Cost, 2016).
    """
    tokens = tensors[0].shape[2]
    if tokens == 0:
        return [], state
    if torch.compiler.is_exporting():  # an unknown number of tokens is one segment
        result, state = step(state, *tensors)
        return [result], state
    # a single segment need not be recomputed: autograd may hold it
    recompute = torch.is_grad_enabled() and tokens > size
    results = []
    # split rather than sliced: the gradient is then one concatenation
    for segment in zip(*(tensor.split(size, dim=2) for tensor in tensors), strict=True):
        if recompute:
            result, state = checkpoint(
                step, state, *segment, use_reentrant=False, preserve_rng_state=False
            )
        else:
            result, state = step(state, *segment)
        results.append(result)
    return results, state


def segment_size(tensor: Tensor, chunk_size: int) -> int:
    """Return the tokens of a segment of tensors like this one, a multiple of the chunk's."""
    if torch.compiler.is_exporting():
        return chunk_size
    batch, heads, tokens, dim = tensor.shape
    most = SEGMENT_ELEMENTS["cpu" if tensor.is_cpu else "other"] // (batch * heads * dim)
    if torch.compiler.is_compiling():
        most = max(most, -(-tokens // TRACED_PARTS))
    return max(1, most // chunk_size) * chunk_size


def size_of_chunk(most: int, tokens: int) -> int:
    """Return the tokens of a chunk; all, if an exported program does not know their number."""
    return min(most, tokens) if are_known(tokens) else tokens


def in_chunks(tensor: Tensor, size: int) -> Tensor:
    """Return [batch, heads, tokens, ...] as [batch, heads, chunks, size, ...], zero-padded."""
    missing = -tensor.shape[2] % size
    if missing:
        tensor = F.pad(tensor, (0, 0) * (tensor.ndim - 3) + (0, missing))
    return tensor.unflatten(2, (tensor.shape[2] // size, size))
