"""The delta rule in chunks: a memory that each token corrects, computed by matrix products.

Within a chunk, the write of token t depends on the writes of the tokens before it. One triangular
system gives all of them (the UT transform of Yang et al., Parallelizing Linear Transformers with
the Delta Rule over Sequence Length, 2024), so that only chunks, not tokens, are sequential.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from attnkit.core.arguments import at_least, floating
from attnkit.core.inputs import Inputs, check_inputs
from attnkit.core.kernels.base import Backend, dropout_reasons, empty_reasons
from attnkit.core.kernels.recurrence import in_chunks, scan, segment_size, size_of_chunk
from attnkit.core.masks.sequences import Causal
from attnkit.core.normalizers import DeltaRule
from attnkit.core.operators.precision import no_autocast, wide

CHUNK = 64


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
    return _in_chunks(inputs, rule.written(inputs), state, chunk_size)


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
        output, _ = _in_chunks(inputs, rule.written(inputs), features=rule.features)
        return output


def _in_chunks(
    inputs: Inputs,
    beta: Tensor,
    state: Tensor | None = None,
    chunk_size: int = CHUNK,
    features: Callable[[Tensor], Tensor] = lambda tokens: tokens,
) -> tuple[Tensor, Tensor]:
    query, key, value = inputs.query, inputs.key, inputs.value
    dtype = wide(query.dtype)
    if state is None:
        state = query.new_zeros(*query.shape[:2], query.shape[3], value.shape[3])
    step = partial(_step, features, chunk_size)
    with no_autocast(query):
        outputs, state = scan(
            step, state.to(dtype), (query, key, value, beta), segment_size(query, chunk_size)
        )
    if not outputs:
        return value.new_zeros(*query.shape[:3], value.shape[3]), state
    return torch.cat(outputs, dim=2), state


def _step(
    features: Callable[[Tensor], Tensor],
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
