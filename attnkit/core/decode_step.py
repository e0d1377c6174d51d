"""One step of decoding: attention from a few new tokens to cached keys and values."""

from typing import Any

import torch
from torch import Tensor, nn

from attnkit.core.arguments import floating
from attnkit.core.cache import KeyValueCache
from attnkit.core.inputs import check_inputs
from attnkit.core.kernels.record import note_kernel
from attnkit.core.listeners import LISTENERS, Seen, notify, without_listeners
from attnkit.core.multihead import MultiHeadAttention, Positions
from attnkit.core.normalizers import Softmax
from attnkit.core.operators.precision import EXACT
from attnkit.core.running import others_follow
from attnkit.core.scores.kinds import ScaledDot


def attention_step(
    block: MultiHeadAttention,
    tokens: Tensor,
    cache: KeyValueCache,
    *,
    bias: Tensor | None = None,
    positions: Positions | None = None,
) -> Tensor:
    """Compute `block(tokens, cache=cache, bias=bias, positions=positions)` with less overhead.

    At the sizes of a step, checking arguments and choosing a kernel take as long as computing. A
    plain block (softmax of scaled dot products) is computed directly, as two products with a
    softmax between them. Any other block goes through its `forward`, and so does a block with hooks
    or a `forward` of its own. Through `forward`, greedy decoding of 32 items with 6 layers takes 8
    % longer.

    Args:
        tokens: the new tokens, [batch, tokens, dim].
        bias: added to the scores, broadcastable to [batch, heads, tokens, keys]; −∞ hides a key.
            The attention of a token that sees no key is 0.
    """
    if not (_is_plain(block, tokens) and block.is_fused):
        return block(tokens, cache=cache, bias=bias, positions=positions)
    projected = block.in_proj(tokens)
    query, key, value = projected.unflatten(-1, (3, block.num_heads, -1)).permute(2, 0, 3, 1, 4)
    if positions is not None:
        query, key = positions(query, key)
    output = _attended(block, query, *cache.write(key, value), bias)
    cache.num_tokens += tokens.shape[1]
    return output


def memory_step(
    block: MultiHeadAttention, tokens: Tensor, memory: KeyValueCache, *, bias: Tensor | None = None
) -> Tensor:
    """Compute `block(tokens, memory, bias=bias)` with less overhead, for a memory that
    `block.remember` made."""
    if not _is_plain(block, tokens):
        return block(tokens, memory, bias=bias)
    return _attended(block, block.project_query(tokens), memory.key, memory.value, bias)


def _is_plain(block: MultiHeadAttention, tokens: Tensor) -> bool:
    return (
        type(block.score) is ScaledDot
        and block.score.softcap is None
        and type(block.normalizer) is Softmax
        and block.gate_proj is None
        and block.sink is None
        and block.num_kv_heads == block.num_heads
        and block.value_head_dim == block.head_dim
        and type(block.query_norm) is nn.Identity
        and block.backend == "auto"
        and not (block.training and block.dropout_p)
        and not (block._forward_hooks or block._forward_pre_hooks or others_follow())
        and type(block).forward is MultiHeadAttention.forward
        and "forward" not in vars(block)  # accelerate replaces it there
        and tokens.dtype in (torch.float32, torch.float64)
        and not torch.is_grad_enabled()
        and not EXACT.get()
        and not torch.is_autocast_enabled(tokens.device.type)
    )


def _attended(
    block: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> Tensor:
    if not torch.compiler.is_compiling() and LISTENERS.get():
        with without_listeners() as listeners:
            output = _averaged(block, query, key, value, bias)
            score: Any = block.score
            inputs = check_inputs(query, key, value, score=score, bias=bias)
            notify(listeners, Seen("attend", inputs, output, module=block))
    else:
        output = _averaged(block, query, key, value, bias)
    return block.out_proj(output.transpose(1, 2).flatten(2))


def _averaged(
    block: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the averages of the values, [batch, heads, tokens, head_dim]."""
    assert isinstance(block.score, ScaledDot)
    batch, num_heads, num_queries, head_dim = query.shape
    scores = torch.baddbmm(
        query.new_empty(1, 1, 1),
        query.reshape(-1, num_queries, head_dim),
        key.flatten(0, 1).mT,
        beta=0,
        alpha=block.score.factor(head_dim),
    )
    if bias is not None:
        floating("bias", bias, query)
        scores.view(batch, num_heads, num_queries, scores.shape[2]).add_(bias)
    output = scores.softmax(dim=-1) @ value.flatten(0, 1)
    output = output.view(batch, num_heads, num_queries, head_dim)
    note_kernel("step")
    if bias is None:
        return output
    return output.masked_fill((bias == -torch.inf).all(-1, keepdim=True), 0.0)
