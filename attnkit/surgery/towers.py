"""The shared block in vision towers of transformers that do not use its attention interface.

Their queries, keys and values are linear layers of one module, and the output projection is one of
another; both are in a third, which an adapter replaces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from attnkit.core.masks.base import Mask
from attnkit.core.multihead import MultiHeadAttention
from attnkit.surgery.adapters import Adapter
from attnkit.surgery.relative import ClampedCosine, CoordinateBias

MakeBlock = Callable[[Any, Any], MultiHeadAttention]
"""A function from a module with timm's names, and changes, to the block."""


class Towers(Adapter):
    """The base class of both adapters: they return a tuple, with the weights if requested."""

    def answer(
        self, tokens: Tensor, bias: Tensor | None, output_attentions: bool | None
    ) -> tuple[Tensor, ...]:
        output = self.attend(tokens, bias=bias)
        if not output_attentions:
            return (output,)
        if self.bias is not None:
            bias = self.bias() if bias is None else self.bias() + bias
        return output, self.attention.attention_weights(tokens, mask=self.mask, bias=bias)


class Swinv2(Towers):
    """Replaces `Swinv2Attention`, for tokens [batch · windows, tokens, dim]."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
    ) -> tuple[Tensor, ...]:
        """Attend; attention_mask: [windows, tokens, tokens], 0 or −100."""
        if attention_mask is not None:
            repeats = hidden_states.shape[0] // attention_mask.shape[0]
            attention_mask = attention_mask[:, None].repeat(repeats, 1, 1, 1)
        return self.answer(hidden_states, attention_mask, output_attentions)


class Data2Vec(Towers):
    """Replaces `Data2VecVisionAttention`: the layer's own bias, which depends on the image's size,
    and one that layers share are added.

    relative: the module that computes the own bias; None: there is none.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        dropout: nn.Module,
        relative: nn.Module | None,
        patch_size: int,
        mask: Mask | None = None,
    ) -> None:
        super().__init__(attention, dropout, mask=mask)
        self.relative = relative
        self.patch_size = patch_size

    def forward(
        self,
        hidden_states: Tensor,
        output_attentions: bool = False,
        relative_position_bias: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] = (0, 0),
    ) -> tuple[Tensor, ...]:
        bias = relative_position_bias
        if self.relative is not None:
            height, width = resolution
            grid = height // self.patch_size, width // self.patch_size
            own = self.relative(grid, interpolate_pos_encoding, dim_size=hidden_states.shape[1])
            bias = own if bias is None else own + bias
        return self.answer(hidden_states, bias, output_attentions)


def from_swin_v2(make_block: MakeBlock, module: Any, changes: Any) -> Adapter:
    theirs = module.self
    block = make_block(_named_as_timms(theirs, module.output), changes)
    if changes.score is None:
        block.score = ClampedCosine(theirs.logit_scale)
    bias = CoordinateBias(
        theirs.continuous_position_bias_mlp,
        theirs.relative_coords_table,
        theirs.relative_position_index,
    )
    return Swinv2(block, module.output.dropout, bias, changes.mask)


def from_data2vec(make_block: MakeBlock, module: Any, changes: Any) -> Adapter:
    theirs = module.attention
    block = make_block(_named_as_timms(theirs, module.output), changes)
    relative = getattr(theirs, "relative_position_bias", None)
    patch_size = theirs.config.patch_size
    return Data2Vec(block, module.output.dropout, relative, patch_size, changes.mask)


def instead(module: nn.Module) -> str:
    """Return a hint about a module of transformers that uses the interface; empty for others."""
    home = type(module).__module__
    if home.startswith("transformers.") and hasattr(sys.modules[home], "ALL_ATTENTION_FUNCTIONS"):
        return '; after interop.register_transformers(), set_attn_implementation("attnkit") has it'
    return ""


def _named_as_timms(theirs: Any, output: Any) -> nn.Module:
    """Return the parts under timm's names, in a module whose class refusals name."""
    named: Any = type(type(theirs).__name__, (nn.Module,), {})()
    named.q_proj, named.k_proj, named.v_proj = theirs.query, theirs.key, theirs.value
    named.proj, named.attn_drop = output.dense, theirs.dropout
    named.num_heads = theirs.num_attention_heads
    return named
