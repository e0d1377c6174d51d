"""Linear attention in time and memory linear in the tokens, which sums over the keys first.

    output_i = φ(q_i) Σ_j φ(k_j)ᵀ v_j / φ(q_i) Σ_j φ(k_j)ᵀ

The sums over the keys are a matrix of head_dim × value_dim and a vector. They are held side by side
as one memory, since the vector is the sum for a value of 1. Causal attention has such a memory for
each query; it is kept for each chunk of tokens, and the chunk itself adds a small matrix of
weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, reduce
from operator import and_

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import Backend, are_known, dropout_reasons, empty_reasons
from attnkit.core.kernels.recurrence import in_chunks, scan, segment_size, size_of_chunk
from attnkit.core.masks.sequences import Causal, Packed, Padding
from attnkit.core.normalizers import Linear
from attnkit.core.operators.precision import no_autocast, wide

Features = Callable[[Tensor], Tensor]

CHUNK = 64  # tokens, as a head usually has dimensions: both products then cost the same


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
