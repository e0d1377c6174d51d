"""timm's attention classes that keep their parameters, projections and forward, around `attend`.

A forward here takes the module, `attend` with the arguments of torch's
`scaled_dot_product_attention`, and the arguments of the module's forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from math import log
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.attend import attend
from attnkit.core.capture.functions import ComputedBy
from attnkit.core.masks.base import Mask
from attnkit.core.normalizers import Normalizer
from attnkit.core.scores.kinds import Cosine, Score
from attnkit.surgery.adapters import Adapter, Given, ours

Forward = Callable[..., Any]
"""(module, attend, *arguments of its forward): runs its forward, with `attend(query, key, value,
attn_mask, dropout_p, scale=…)` as attention, which has the arguments of torch's function."""


class HeadAttention(nn.Module):
    """`attend` for queries, keys and values that are heads already: the shared block without its
    projections.

    score: replaces the network's own; None: that one is used.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.key_dim = num_heads * head_dim
        self.score: Score | nn.Module | None = None
        self.normalizer: Normalizer | nn.Module | None = None
        self.backend = "auto"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        own: str | Score,
        scale: float | None,
        mask: Given,
        bias: Tensor | None,
        dropout_p: float,
    ) -> Tensor:
        """Attend with `own` and `scale`, the network's score; the rest is as in `attend`."""
        score: Any = self.score() if isinstance(self.score, nn.Module) else self.score
        normalizer: Any = self.normalizer
        if normalizer is not None and not self.training:
            normalizer = normalizer.evaluated()
        return attend(
            query,
            key,
            value,
            score=own if score is None else score,
            scale=scale if score is None else None,
            mask=mask,
            bias=bias,
            normalizer="softmax" if normalizer is None else normalizer,
            dropout_p=dropout_p,
            backend=self.backend,
        )


class Kept(Adapter):
    """Replaces `theirs` and computes the same with its parameters and modules."""

    def __init__(
        self, attention: HeadAttention, theirs: nn.Module, forward: Forward, mask: Mask | None
    ) -> None:
        # a block without projections, which is given no tokens
        super().__init__(attention, nn.Identity(), mask=mask)  # type: ignore[arg-type]
        self.theirs: Any = copy.copy(theirs)
        if hasattr(theirs, "fused_attn"):
            vars(self.theirs)["fused_attn"] = True
        self.their_forward = forward

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.their_forward(self.theirs, self._attend, *given, **named)

    def __getattr__(self, name: str) -> Any:
        """Return attributes that networks read, such as the stride of queries, from `theirs`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            theirs = vars(self).get("_modules", {}).get("theirs")
            if theirs is None:
                raise
            return getattr(theirs, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that only `theirs` has there, where its forward reads it."""
        parts = vars(self).get("_modules", {})
        own = vars(self).keys() | parts | vars(self).get("_parameters", {}).keys()
        if name in own or hasattr(type(self), name) or not hasattr(parts.get("theirs"), name):
            super().__setattr__(name, value)
        else:
            setattr(self.theirs, name, value)

    def set_window_size(self, window_size: Any) -> None:
        self.theirs.set_window_size(window_size)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        score: str | Score = "scaled_dot",
    ) -> Tensor:
        """Attend as torch's function does. With three dimensions, images and heads are the first;
        with five, images and windows are the first two."""
        tensors: tuple[Tensor, ...] = query, key, value
        shape = query.shape
        if query.ndim == 3:
            heads = (-1, self.attention.num_heads)
            tensors = tuple(tensor.unflatten(0, heads) for tensor in tensors)
            attn_mask = None if attn_mask is None else attn_mask.unflatten(0, heads)
        elif query.ndim == 5:
            tensors = tuple(tensor.flatten(0, 1) for tensor in tensors)
        mask, bias = ours(attn_mask, is_causal)
        options = {"own": score, "scale": scale, "dropout_p": dropout_p, "bias": bias}
        output = self.attention(*tensors, **options, mask=self._both(mask))
        return output.reshape(*shape[:-1], value.shape[-1])


def fused(theirs: nn.Module, attend: Callable[..., Tensor], *given: Any, **named: Any) -> Any:
    """Run the forward of a module that calls torch's function, which is `attend` meanwhile.

    Raises:
        RuntimeError: `fused_attn` was set to False, as is usual to see weights: the module would
            compute attention itself.
    """
    if not getattr(theirs, "fused_attn", True):
        raise RuntimeError(
            "fused_attn: expected True, got False: attnkit computes this attention, and "
            "attnkit.capture_attention gives its weights"
        )
    with ComputedBy(attend):
        return theirs(*given, **named)


Attend = Callable[..., Tensor]


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """Return tokens [batch, tokens, channels] or maps [batch, channels, height, width] as heads."""
    if x.ndim == 4:
        x = x.flatten(2).transpose(1, 2)
    return x.unflatten(2, (num_heads, -1)).transpose(1, 2)


def _tokens(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def _maps(heads: Tensor, size: Sequence[int]) -> Tensor:
    return heads.transpose(2, 3).flatten(1, 2).unflatten(2, tuple(size))


def _qkv(theirs: Any, x: Tensor, num_heads: int, count: int = 3) -> tuple[Tensor, ...]:
    """Return queries, keys and values of one projection of tokens."""
    return theirs.qkv(x).unflatten(2, (count, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _by_offset(theirs: Any) -> Tensor:
    """Return LeViT's kind of bias, [heads, queries, keys]; timm's own is kept between calls."""
    return theirs.attention_biases[:, theirs.attention_bias_idxs]


def _projected(theirs: Any, heads: Tensor) -> Tensor:
    return theirs.proj_drop(theirs.proj(_tokens(heads)))


def _dropout(theirs: Any) -> float:
    return theirs.attn_drop.p if theirs.training else 0.0


def windows_by_head(theirs: Any, attend: Attend, x: Tensor) -> Tensor:
    """Hiera: mask units are windows on the axis after the heads."""

    def swapped(*tensors: Tensor) -> Tensor:
        if tensors[0].ndim == 4:
            return attend(*tensors)
        return attend(*(tensor.transpose(1, 2) for tensor in tensors)).transpose(1, 2)

    return fused(theirs, swapped, x)


def biased_by_offset(theirs: Any, attend: Attend, x: Tensor) -> Tensor:
    """TinyViT, EfficientFormer and LeViT, for tokens or maps, also with fewer queries."""
    x = theirs.norm(x) if hasattr(theirs, "norm") else x
    sizes = [theirs.key_dim, theirs.val_dim]
    if hasattr(theirs, "kv"):
        queries = theirs.q(x)
        query = _heads(queries, theirs.num_heads)
        key, value = _heads(theirs.kv(x), theirs.num_heads).split(sizes, dim=3)
    else:
        queries = x
        heads = _heads(theirs.qkv(x), theirs.num_heads)
        query, key, value = heads.split([theirs.key_dim, *sizes], dim=3)
    output = attend(query, key, value, _by_offset(theirs), scale=theirs.scale)
    return theirs.proj(_maps(output, queries.shape[2:]) if x.ndim == 4 else _tokens(output))


def cascaded(theirs: Any, attend: Attend, x: Tensor) -> Tensor:
    """EfficientViT (MSRA): a head's output is added to the next one's input."""
    sizes = [theirs.key_dim, theirs.key_dim, theirs.val_dim]
    outputs: list[Tensor] = []
    parts = zip(x.chunk(len(theirs.qkvs), dim=1), theirs.qkvs, theirs.dws, strict=True)
    for (part, qkv, local), bias in zip(parts, _by_offset(theirs), strict=True):
        part = part + outputs[-1] if outputs else part
        query, key, value = qkv(part).split(sizes, dim=1)
        heads = (_heads(tensor, 1) for tensor in (local(query), key, value))
        outputs.append(_maps(attend(*heads, bias, scale=theirs.scale), x.shape[2:]))
    return theirs.proj(torch.cat(outputs, dim=1))


def talking_heads(theirs: Any, attend: Attend, x: Tensor) -> Tensor:
    """CaiT, with talking heads."""
    heads = _qkv(theirs, x, theirs.num_heads)
    output = _talking(attend, heads, theirs.proj_l, theirs.proj_w, scale=theirs.scale)
    return _projected(theirs, output)


def of_maps(theirs: Any, attend: Attend, x: Tensor) -> Tensor:
    """EfficientFormer V2, with talking heads except where queries are fewer pixels."""
    x = x if getattr(theirs, "stride_conv", None) is None else theirs.stride_conv(x)
    values = theirs.v(x)
    local = theirs.v_local(values)
    heads = [_heads(maps, theirs.num_heads) for maps in (theirs.q(x), theirs.k(x), values)]
    bias, scale = _by_offset(theirs), theirs.scale
    if hasattr(theirs, "talking_head1"):
        mixing = theirs.talking_head1, theirs.talking_head2
        output = _talking(attend, heads, *mixing, bias=bias, scale=scale)
    else:
        output = attend(*heads, bias, scale=scale)
    x = _maps(output, local.shape[2:]) + local
    x = x if getattr(theirs, "upsample", None) is None else theirs.upsample(x)
    return theirs.proj(theirs.act(x))


def _talking(
    attend: Attend,
    heads: Sequence[Tensor],
    before: Any,
    after: Any,
    *,
    bias: Tensor | None = None,
    scale: float,
) -> Tensor:
    """Talking heads (Shazeer et al., 2020), which mix scores S before softmax and weights after it:

        output_h = (Σ_g W_hg softmax(Σ_f L_gf S_f) + c_h) · v_h

    Σ_f L_gf q_f·k_f is the product of one query, all L_gf q_f side by side, with one key, all k_f;
    so attention has one key and value head as wide as all. The bias of L changes no weight.
    """
    query, key, value = heads
    first, second = before.weight.flatten(1), after.weight.flatten(1)
    mixed = torch.einsum("gf,bfqd->bgqfd", first, query).flatten(3)
    wide_key, wide_value = (_tokens(tensor)[:, None] for tensor in (key, value))
    mixed_bias = None if bias is None else torch.einsum("gf,fqk->gqk", first, bias)
    output = attend(mixed, wide_key, wide_value, mixed_bias, scale=scale)
    output = output.unflatten(3, (len(second), -1))  # [batch, g, queries, h, channels]
    output = torch.einsum("hg,bgqhd->bhqd", second, output)
    if after.bias is not None:
        output = output + after.bias[:, None, None] * value.sum(dim=2, keepdim=True)
    return output


def gated_by_position(theirs: Any, attend: Attend, x: Tensor) -> Tensor:
    """ConViT: the mean of two attentions, by content and by position, with a learned weight."""
    num_tokens = x.shape[1]
    if theirs.rel_indices.shape[1] != num_tokens:
        theirs.rel_indices = theirs.get_rel_indices(num_tokens)
    query, key = _heads(theirs.qk(x), 2 * theirs.num_heads).chunk(2, dim=1)
    value = _heads(theirs.v(x), theirs.num_heads)
    places = theirs.pos_proj(theirs.rel_indices).permute(0, 3, 1, 2)
    by_place = attend(torch.zeros_like(query), torch.zeros_like(key), value, places)
    gate = theirs.gating_param.sigmoid()[:, None, None]
    by_content = attend(query, key, value, scale=theirs.scale)
    # `lerp` is not promoted under autocast, where the gate alone stays in float32
    gate, by_place = gate.to(by_content.dtype), by_place.to(by_content.dtype)
    return _projected(theirs, by_content + gate * (by_place - by_content))


def asked_by_all_windows(
    theirs: Any, attend: Attend, x: Tensor, q_global: Tensor | None = None
) -> Tensor:
    """GCViT: a whole image may give the queries of each of its windows."""
    num_heads = theirs.num_heads
    if theirs.use_global and q_global is not None:
        queries = q_global.repeat_interleave(len(x) // len(q_global), dim=0)
        query = _heads(queries.reshape(x.shape), num_heads)
        key, value = _qkv(theirs, x, num_heads, count=2)
    else:
        query, key, value = _qkv(theirs, x, num_heads)
    bias = theirs.rel_pos.get_bias()
    return _projected(theirs, attend(query, key, value, bias, _dropout(theirs)))


def bottleneck(theirs: Any, attend: Attend, x: Tensor) -> Tensor:
    """BoTNet, with a bias from queries and learned offsets along each axis."""
    sizes = [theirs.dim_out_qk, theirs.dim_out_qk, theirs.dim_out_v]
    query, key, value = (_heads(p, theirs.num_heads) for p in theirs.qkv(x).split(sizes, dim=1))
    bias = theirs.pos_embed(query.flatten(0, 1)).unflatten(0, (-1, theirs.num_heads))
    bias = bias * theirs.scale if theirs.scale_pos_embed else bias
    return theirs.pool(_maps(attend(query, key, value, bias, scale=theirs.scale), x.shape[2:]))


def pooled(
    theirs: Any, attend: Attend, x: Tensor, feat_size: list[int]
) -> tuple[Tensor, list[int]]:
    """MViT v2, with pooled queries, keys and values, and a bias from queries and offsets."""
    from timm.models.mvitv2 import cal_rel_pos_type, reshape_post_pool, reshape_pre_pool

    parts, sizes = [], []
    for name, part in zip("qkv", _qkv(theirs, x, theirs.num_heads), strict=True):
        pool, norm = getattr(theirs, f"pool_{name}"), getattr(theirs, f"norm_{name}")
        size = feat_size
        if pool is not None:
            maps, first = reshape_pre_pool(part, feat_size, theirs.has_cls_token)
            part, size = reshape_post_pool(pool(maps), theirs.num_heads, first)
        parts.append(part if norm is None else norm(part))
        sizes.append(size)
    query, key, _ = parts
    bias = None
    if theirs.rel_pos_type == "spatial":
        zeros = query.new_zeros(*query.shape[:3], key.shape[2])
        tables = theirs.rel_pos_h, theirs.rel_pos_w
        bias = cal_rel_pos_type(zeros, query, theirs.has_cls_token, *sizes[:2], *tables)
    output = attend(*parts, bias, scale=theirs.scale)
    return theirs.proj(_tokens(output + query if theirs.residual_pooling else output)), sizes[0]


def windows_by_cosine(theirs: Any, attend: Attend, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Swin V2 as in timm's `swin_transformer_v2_cr`; mask: as in `windows.Windows`."""
    bias = theirs._relative_positional_encodings()
    if mask is not None:
        bias = bias + mask[:, None].repeat(len(x) // len(mask), 1, 1, 1)
    score = Cosine(theirs.logit_scale.clamp(max=log(100)).neg().exp())
    heads = _qkv(theirs, x, theirs.num_heads)
    return _projected(theirs, attend(*heads, bias, _dropout(theirs), score=score))


def over_channels(theirs: Any, attend: Attend, x: Tensor) -> Tensor:
    """DaViT over channels; in its first version, keys attend to values and queries are summed."""
    if hasattr(theirs, "groups"):
        query, key, value = _qkv(theirs, x, theirs.groups)
        scale = (x.shape[1] if theirs.dynamic_scale else theirs.head_dim) ** -0.5
    else:
        value, query, key = _qkv(theirs, x, theirs.num_heads)
        scale = theirs.scale
    output = attend(*(tensor.mT for tensor in (query, key, value)), scale=scale)
    return theirs.proj(_tokens(output.mT))


def cross_covariance(theirs: Any, attend: Attend, x: Tensor) -> Tensor:
    """XCiT and EdgeNeXt over channels, by cosines."""
    query, key, value = (tensor.mT for tensor in _qkv(theirs, x, theirs.num_heads))
    query, key = F.normalize(query, dim=-1) * theirs.temperature, F.normalize(key, dim=-1)
    return _projected(theirs, attend(query, key, value, None, _dropout(theirs), scale=1.0).mT)


def of_some_channels(theirs: Any, attend: Attend, x: Tensor) -> Tensor:
    """SHViT: one head attends with some of the channels."""
    some, rest = x.split([theirs.pdim, theirs.dim - theirs.pdim], dim=1)
    sizes = [theirs.qk_dim, theirs.qk_dim, theirs.pdim]
    parts = theirs.qkv(theirs.pre_norm(some)).split(sizes, dim=1)
    output = attend(*(_heads(part, 1) for part in parts), scale=theirs.scale)
    return theirs.proj(torch.cat([_maps(output, x.shape[2:]), rest], dim=1))


MIXING = (talking_heads, of_maps, gated_by_position)
"""The forwards that mix weights after softmax."""
OVER_CHANNELS = (over_channels, cross_covariance)
"""The forwards whose queries and keys are channels, as wide as there are tokens."""

FORWARDS: dict[str, Forward] = {
    **dict.fromkeys(
        (
            "timm.layers.attention2d:Attention2d",
            "timm.layers.attention2d:MultiQueryAttention2d",
            "timm.layers.attention_pool:AttentionPoolLatent",
            "timm.layers.attention_pool2d:AttentionPool2d",
            "timm.layers.attention_pool2d:RotAttentionPool2d",
            "timm.layers.diff_attention:DiffAttention",
            "timm.models.cait:ClassAttn",
            "timm.models.cpubone:ConvAttention",
            "timm.models.fastvit:Attention",
            "timm.models.gemma4_vit:Gemma4Attention",
            "timm.models.hieradet_sam2:MultiScaleAttention",
            "timm.models.iformer:SHMA",
            "timm.models.lowformer:ConvAttention",
            "timm.models.maxxvit:Attention2d",
            "timm.models.maxxvit:AttentionCl",
            "timm.models.nest:Attention",
            "timm.models.nextvit:EfficientAttention",
            "timm.models.pvt_v2:Attention",
            "timm.models.twins:GlobalSubSampleAttn",
            "timm.models.twins:LocallyGroupedAttn",
            "timm.models.vision_transformer_sam:Attention",
            "timm.models.visformer:Attention",
            "timm.models.volo:Attention",
        ),
        fused,
    ),
    "timm.layers.bottleneck_attn:BottleneckAttn": bottleneck,
    "timm.models.cait:TalkingHeadAttn": talking_heads,
    "timm.models.convit:GPSA": gated_by_position,
    "timm.models.davit:ChannelAttention": over_channels,
    "timm.models.davit:ChannelAttentionV2": over_channels,
    "timm.models.edgenext:CrossCovarianceAttn": cross_covariance,
    "timm.models.efficientformer:Attention": biased_by_offset,
    "timm.models.efficientformer_v2:Attention2d": of_maps,
    "timm.models.efficientformer_v2:Attention2dDownsample": of_maps,
    "timm.models.efficientvit_msra:CascadedGroupAttention": cascaded,
    "timm.models.gcvit:WindowAttentionGlobal": asked_by_all_windows,
    "timm.models.hiera:MaskUnitAttention": windows_by_head,
    "timm.models.levit:Attention": biased_by_offset,
    "timm.models.levit:AttentionDownsample": biased_by_offset,
    "timm.models.mvitv2:MultiScaleAttention": pooled,
    "timm.models.shvit:SHSA": of_some_channels,
    "timm.models.swin_transformer_v2_cr:WindowMultiHeadAttention": windows_by_cosine,
    "timm.models.tiny_vit:Attention": biased_by_offset,
    "timm.models.xcit:XCA": cross_covariance,
}
