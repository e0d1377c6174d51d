"""Weights of torch's attention and of timm's and torchvision's Vision Transformers and gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from attnkit.core.multihead import MultiHeadAttention
from attnkit.interop.conversion import (
    State,
    check_class,
    has_hooks,
    loaded,
    refuse,
    renamed,
    state_of,
    unknown_parts,
)
from attnkit.interop.gates import gates_of_timm, gates_of_torchvision
from attnkit.models.vit import ViT

if TYPE_CHECKING:
    import timm.models.vision_transformer


_PLAIN = {nn.Conv2d, nn.Dropout, nn.GELU, nn.Identity, nn.LayerNorm, nn.Linear, nn.Sequential}

_FROM_TORCHVISION = {
    "conv_proj.": "patch_embed.",
    "encoder.ln.": "norm.",
    "encoder.layers.encoder_layer_": "blocks.",
    ".ln_1.": ".attention_norm.",
    ".self_attention.in_proj_": ".attention.in_proj.",
    ".self_attention.": ".attention.",
    ".ln_2.": ".mlp_norm.",
    ".mlp.0.": ".mlp.fc1.",
    ".mlp.3.": ".mlp.fc2.",
}


@torch.enable_grad()  # so that joined parameters know whether they are frozen
def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """Convert torch's `nn.MultiheadAttention` to attnkit's block, with equal outputs.

    The block takes [batch, tokens, channels], whatever `batch_first` was: for a module with
    `batch_first=False`, transpose inputs and output. torch's masks are True where a key is hidden,
    attnkit's where it is seen: `key_padding_mask=hidden` becomes `mask=Padding(~hidden)`, a boolean
    `attn_mask=hidden` becomes `mask=~hidden`, a float one `bias=`.

    Raises:
        TypeError: another class, subclasses included.
        ValueError: the module has `add_bias_kv` or `add_zero_attn`.
    """
    check_class(module, nn.MultiheadAttention)
    refuse(
        module,
        {
            "add_bias_kv: learned extra keys": module.bias_k is not None,
            "add_zero_attn: an extra key of zeros": module.add_zero_attn,
            "hooks": has_hooks(module) or has_hooks(module.out_proj),
        },
    )
    is_fused = module.in_proj_weight is not None  # with equal channels, in cross-attention too
    block = MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        key_dim=None if is_fused else module.kdim,
        value_dim=None if is_fused else module.vdim,
        bias=module.in_proj_bias is not None,
        out_bias=module.out_proj.bias is not None,
        dropout_p=module.dropout,
    )
    names = {"in_proj_": "in_proj."}
    if not is_fused:
        letters = {"q": "query", "k": "key", "v": "value"}
        names = {f"{letter}_proj_": f"{name}_proj." for letter, name in letters.items()}
    state = renamed(state_of(module), names)
    if not is_fused and "in_proj_bias" in state:
        parts = ("query_proj.bias", "key_proj.bias", "value_proj.bias")
        state.update(zip(parts, state.pop("in_proj_bias").chunk(3), strict=True))
    return loaded(block, state, module)


@overload
def from_timm(model: timm.models.vision_transformer.VisionTransformer) -> ViT: ...
@overload
def from_timm(model: nn.Module) -> nn.Module: ...
@torch.enable_grad()
def from_timm(model: Any) -> nn.Module:
    """Convert timm's ViT or gate to attnkit's, with its weights and equal outputs.

    Gates: `SEModule`, `EcaModule`, `CbamModule`, its parts `ChannelAttn` and `SpatialAttn`, and
    `CoordAttn`. `EcaModule` and `SpatialAttn` do not keep their number of channels; their
    `channels` is None.

    Vision Transformers: class-token, average and attention ("map") pooling, registers, layer scale,
    query/key norm, positions with or without an entry for the prefix tokens, CLIP's pre-norm, DeiT
    without a distillation token. Rates of dropout and drop path are carried over. A model with
    `dynamic_img_size` becomes one of its present size; `ViT.resize` changes it.

    `NaFlexVit`: a `ViT` with `native=True` that takes a list of images of different sizes, with
    learned or factorized positions resampled to each image's grid as in timm.

    Raises:
        TypeError: the class is not timm's `VisionTransformer`, `NaFlexVit` or such a gate itself.
        ValueError: the model has parts that attnkit's lacks; all of them are named.
    """
    from timm.layers import (
        Attention,
        AttentionPoolLatent,
        DropPath,
        LayerNorm,
        LayerScale,
        Mlp,
        PatchDropout,
        PatchEmbed,
    )
    from timm.layers.activations import GELU, GELUTanh
    from timm.models.naflexvit import NaFlexVit
    from timm.models.vision_transformer import Block, VisionTransformer

    if type(model) is NaFlexVit:
        from attnkit.interop.naflex import as_vision_transformer, with_positions_of

        like: Any = as_vision_transformer(model)
        return with_positions_of(model, from_timm(like))
    check_class(model, VisionTransformer, *(gates := gates_of_timm()))
    if type(model) in gates:
        return gates[type(model)](model)
    known = {VisionTransformer, PatchEmbed, PatchDropout, Block, Attention, Mlp, LayerNorm}
    known |= {LayerScale, DropPath, AttentionPoolLatent, GELU, GELUTanh, *_PLAIN}
    refuse(model, unknown_parts(model, known))

    blocks: list[Any] = list(model.blocks)
    pool: Any = model.attn_pool
    pooling: Any = {"token": "class", "avg": "mean", "map": "attention"}.get(model.global_pool)
    heads = [block.attn for block in blocks] + ([] if pool is None else [pool])
    num_heads, dim = blocks[0].attn.num_heads, model.embed_dim
    dropouts = {p for b in blocks for p in (b.attn.proj_drop.p, b.mlp.drop1.p, b.mlp.drop2.p)} | {
        model.pos_drop.p
    }
    attention_dropouts = {block.attn.attn_drop.p for block in blocks}
    activations = [_activation(part.mlp.act) for part in [*blocks, pool] if part is not None]
    pooled_norm = isinstance(model.fc_norm, nn.LayerNorm)
    refuse(
        model,
        {
            **_uneven(model, model.patch_embed.proj, activations),
            f"global_pool={model.global_pool!r}": pooling is None,
            "pool_include_prefix: pools the class token too": model.pool_include_prefix,
            "no final norm, or two": pooled_norm == isinstance(model.norm, nn.LayerNorm),
            "heads that differ or are not dim / num_heads wide": {
                (attention.num_heads, attention.head_dim, attention.scale) for attention in heads
            }
            != {(num_heads, dim // num_heads, (dim // num_heads) ** -0.5)},
            "gated attention": any(block.attn.gate is not None for block in blocks),
            "norms before the output projections": any(
                isinstance(part.norm, nn.LayerNorm)
                for block in blocks
                for part in (block.attn, block.mlp)
            ),
            "drop_rate: dropout before the head": model.head_drop.p > 0,
            "dropout rates that differ": len(dropouts) > 1 or len(attention_dropouts) > 1,
            "gradient checkpointing": model.grad_checkpointing,
            "another attention pooling than one latent query": pool is not None
            and (
                pool.latent_len != 1
                or pool.pool != "token"
                or pool.proj_drop.p > 0
                or not isinstance(pool.q, nn.Linear)
            ),
        },
    )
    patch: Any = model.patch_embed.proj
    vit = ViT(
        image_size=model.patch_embed.img_size,
        patch_size=model.patch_embed.patch_size,
        in_channels=patch.in_channels,
        num_classes=model.num_classes,
        dim=dim,
        depth=len(blocks),
        num_heads=num_heads,
        mlp_ratio=blocks[0].mlp.fc1.out_features / dim,
        positions=None if model.pos_embed is None else "learned",
        pooling=pooling,
        class_token=model.has_class_token,
        num_registers=model.num_reg_tokens,
        qkv_bias=blocks[0].attn.qkv.bias is not None,
        qk_norm=isinstance(blocks[0].attn.q_norm, nn.LayerNorm),
        layer_scale=None if isinstance(blocks[0].ls1, nn.Identity) else 1.0,
        dropout_p=model.pos_drop.p,
        attention_dropout_p=blocks[0].attn.attn_drop.p,
        drop_path=_rate(blocks[-1].drop_path1),
        patch_dropout=_rate(model.patch_drop),
        embed_norm=isinstance(model.norm_pre, nn.LayerNorm),
        norm_after_pooling=pooled_norm,
        activation=_activation(blocks[0].mlp.act),
        norm_eps=blocks[0].norm1.eps,
    )
    ours: list[Any] = list(vit.blocks)
    rates = [(_rate(b.drop_path1), _rate(b.drop_path2)) for b in blocks]
    linear = [(_rate(block.drop_path),) * 2 for block in ours]
    refuse(model, {"drop path that does not rise linearly": not torch.allclose(
        torch.tensor(rates), torch.tensor(linear))})  # fmt: skip

    state = named_as_ours(state_of(model), prefix_has_positions=not model.no_embed_class)
    return _in_their_modes(loaded(vit, state, model), blocks)


@torch.enable_grad()
def from_torchvision(model: Any) -> Any:
    """Convert torchvision's ViT or `SqueezeExcitation` to attnkit's, with equal outputs.

    Raises:
        TypeError: another class.
        ValueError: the model has a part that attnkit's lacks, such as a convolutional stem, a
            representation layer before the head, or another activation in the gate.
    """
    from torchvision.models import VisionTransformer
    from torchvision.models.vision_transformer import Encoder, EncoderBlock, MLPBlock

    check_class(model, VisionTransformer, *(gates := gates_of_torchvision()))
    if type(model) in gates:
        return gates[type(model)](model)
    known = {VisionTransformer, Encoder, EncoderBlock, MLPBlock, nn.MultiheadAttention}
    known |= {type(nn.MultiheadAttention(1, 1).out_proj), *_PLAIN}
    refuse(model, unknown_parts(model, known))
    heads: list[Any] = [m for m in model.heads.modules() if not isinstance(m, nn.Sequential)]
    refuse(
        model,
        {
            "a convolutional stem": not isinstance(model.conv_proj, nn.Conv2d),
            "heads other than one linear layer": [type(m) for m in heads] != [nn.Linear],
        },
    )
    layers: list[Any] = list(model.encoder.layers)
    dropouts = {p for b in layers for p in (b.dropout.p, b.mlp[2].p, b.mlp[4].p)}
    dropouts.add(model.encoder.dropout.p)
    attention_dropouts = {block.self_attention.dropout for block in layers}
    refuse(
        model,
        {
            **_uneven(model, model.conv_proj, [_activation(block.mlp[1]) for block in layers]),
            "heads that differ": len({b.self_attention.num_heads for b in layers}) > 1,
            "dropout rates that differ": len(dropouts) > 1 or len(attention_dropouts) > 1,
        },
    )
    patch: Any = model.conv_proj
    vit = ViT(
        image_size=model.image_size,
        patch_size=model.patch_size,
        in_channels=patch.in_channels,
        num_classes=heads[0].out_features,
        dim=model.hidden_dim,
        depth=len(layers),
        num_heads=layers[0].self_attention.num_heads,
        mlp_ratio=layers[0].mlp[0].out_features / model.hidden_dim,
        dropout_p=model.encoder.dropout.p,
        attention_dropout_p=layers[0].self_attention.dropout,
        activation=_activation(layers[0].mlp[1]),
        norm_eps=layers[0].ln_1.eps,
    )
    trunk = {k: v for k, v in state_of(model).items() if not k.startswith("heads.")}
    state = renamed(trunk, _FROM_TORCHVISION)
    state.update(state_of(heads[0], "head."))
    positions = state.pop("encoder.pos_embedding")
    state["class_token"] = state["class_token"] + positions[:, :1]
    state["position_table"] = positions[:, 1:]
    return _in_their_modes(loaded(vit, state, model), layers)


def _in_their_modes(vit: ViT, blocks: list[nn.Module]) -> ViT:
    """Give each block the mode of the original: the first ones may be in evaluation, frozen."""
    for mine, theirs in zip(vit.blocks, blocks, strict=True):
        mine.train(theirs.training)
    return vit


def _uneven(model: nn.Module, patch: nn.Conv2d, activations: list[str | None]) -> dict[str, bool]:
    """Return settings that attnkit's ViT has once, for the whole model, or not at all."""
    epsilons = {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)}
    geometry = (patch.stride, patch.padding, patch.dilation, patch.groups)
    return {
        f"layer norms of different eps {sorted(epsilons)}": len(epsilons) > 1,
        "another activation than GELU": None in activations,
        "activations that differ": len(set(activations)) > 1,
        "patches that overlap or leave gaps": geometry != (patch.kernel_size, (0, 0), (1, 1), 1),
    }


def _activation(module: nn.Module) -> Any:
    """Return the name of torch's or timm's GELU; None for other modules."""
    kind = {"GELU": "gelu", "GELUTanh": "gelu_tanh"}.get(type(module).__name__)
    return "gelu_tanh" if getattr(module, "approximate", "none") == "tanh" else kind


def _rate(module: nn.Module) -> float:
    """Return the rate of timm's DropPath or PatchDropout; 0 for an Identity."""
    return getattr(module, "drop_prob", getattr(module, "prob", 0.0))


_FROM_TIMM = {
    "patch_embed.proj.": "patch_embed.",
    "cls_token": "class_token",
    "reg_token": "registers",
    "norm_pre.": "embed_norm.",
    "fc_norm.": "pooled_norm.",
    ".norm1.": ".attention_norm.",
    ".attn.qkv.": ".attention.in_proj.",
    ".attn.q_norm.": ".attention.query_norm.",
    ".attn.k_norm.": ".attention.key_norm.",
    ".attn.proj.": ".attention.out_proj.",
    ".ls1.": ".attention_scale.",
    ".norm2.": ".mlp_norm.",
    ".ls2.": ".mlp_scale.",
    "attn_pool.latent": "pool.query",
    "attn_pool.proj.": "pool.attention.out_proj.",
    "attn_pool.norm.": "pool.norm.",
    "attn_pool.mlp.": "pool.mlp.",
}


def named_as_ours(theirs: Mapping[str, Tensor], *, prefix_has_positions: bool) -> State:
    """Return a state dict of timm's `VisionTransformer` as one of `ViT`, for the same images.

    Args:
        theirs: timm's state dict.
        prefix_has_positions: whether the class token and registers have positions too, as with
            timm's `no_embed_class=False`.
    """
    state = renamed(theirs, _FROM_TIMM)
    if "pos_embed" in state:
        # the position of a prefix token is added to that token alone, so it becomes part of it
        positions = state.pop("pos_embed")
        for name in ("class_token", "registers"):
            if name in state and prefix_has_positions:
                count = state[name].shape[1]
                state[name] = state[name] + positions[:, :count]
                positions = positions[:, count:]
        state["position_table"] = positions
    if "pool.query" in state:
        for kind in ("weight", "bias"):
            query, memory = (state.pop(f"attn_pool.{part}.{kind}") for part in ("q", "kv"))
            parts = zip(("query", "key", "value"), (query, *memory.chunk(2)), strict=True)
            state |= {f"pool.attention.{name}_proj.{kind}": part for name, part in parts}
    return state
