"""Weights from modules nobody here wrote, with equal outputs.

What a model has and attnkit's does not is refused with the reason, never dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnkit.core.multihead import MultiHeadAttention
from attnkit.models.loading import load_matching
from attnkit.models.vit import ViT

if TYPE_CHECKING:
    import timm.models.vision_transformer
    import torchvision.models

__all__ = ["from_timm", "from_torch", "from_torchvision"]

State = dict[str, Tensor]


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """attnkit's block with the weights of torch's `nn.MultiheadAttention`; equal outputs.

    Ours takes [batch, tokens, channels] whatever `batch_first` was. torch's masks hide where they
    are True, ours show: `key_padding_mask=hidden` becomes `mask=Padding(~hidden)`, a boolean
    `attn_mask=hidden` becomes `mask=~hidden`, a float one `bias=`.

    Raises:
        ValueError: the module has `add_bias_kv` or `add_zero_attn`.
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(f"module: expected nn.MultiheadAttention, got {type(module).__name__}")
    _refuse(
        module,
        {
            "add_bias_kv: learned extra keys": module.bias_k is not None,
            "add_zero_attn: an extra key of zeros": module.add_zero_attn,
        },
    )
    block = MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        key_dim=module.kdim,
        value_dim=module.vdim,
        bias=module.in_proj_bias is not None,
        out_bias=module.out_proj.bias is not None,
        dropout_p=module.dropout,
    )
    return _loaded(block, _multihead_state(module), module)


def from_timm(model: timm.models.vision_transformer.VisionTransformer) -> ViT:
    """attnkit's ViT with the weights of a plain Vision Transformer of timm; equal logits.

    Served: class-token, average and attention ("map") pooling, registers, layer scale, query/key
    norm, positions with or without an entry for the prefix tokens, CLIP's pre-norm, DeiT without
    a distillation token. Rates of dropout and drop path are carried over.

    Raises:
        TypeError: not a `timm.models.vision_transformer.VisionTransformer` itself.
        ValueError: it has a part that attnkit's ViT does not; all of them are named.
    """
    from timm.layers import AttentionPoolLatent, Mlp, PatchEmbed
    from timm.layers.attention import Attention
    from timm.models.vision_transformer import Block, VisionTransformer

    if type(model) is not VisionTransformer:
        raise TypeError(
            "model: expected timm's VisionTransformer itself, whose forward is known, "
            f"got {type(model).__module__}.{type(model).__qualname__}"
        )
    block: Any = model.blocks[0]
    pooling: Any = {"token": "class", "avg": "mean", "map": "attention"}.get(model.global_pool)
    _refuse(
        model,
        {
            f"global_pool={model.global_pool!r}": pooling is None,
            "pool_include_prefix: pools the class token too": model.pool_include_prefix,
            "other blocks than Block": any(type(b) is not Block for b in model.blocks),
        },
    )
    activation: Any = _activation(block.mlp.act) if type(block.mlp) is Mlp else None
    final_norm, pooled_norm = (
        isinstance(norm, nn.LayerNorm) for norm in (model.norm, model.fc_norm)
    )
    pool = model.attn_pool
    _refuse(
        model,
        {
            "another patch embedding than PatchEmbed": type(model.patch_embed) is not PatchEmbed,
            "a norm in the patch embedding": not isinstance(model.patch_embed.norm, nn.Identity),
            "another attention than Attention": type(block.attn) is not Attention,
            "another MLP than Mlp with GELU": activation is None,
            "no final layer norm, or another norm": final_norm == pooled_norm,
            "another norm than LayerNorm": any("Norm" in type(m).__name__
                and not isinstance(m, nn.LayerNorm) for m in model.modules()),
            "scaled attention norm": not isinstance(getattr(block.attn, "norm", None), nn.Identity),
            "gated attention": getattr(block.attn, "gate", None) is not None,
            "scaled MLP norm": not isinstance(getattr(block.mlp, "norm", None), nn.Identity),
            "no bias in the output projections": block.attn.proj.bias is None,
            "drop_rate: dropout before the head": model.head_drop.p > 0,
            "pos_drop_rate and proj_drop_rate that differ": model.pos_drop.p
            != block.attn.proj_drop.p,
            "another attention pooling than one latent query": pool is not None
            and (type(pool) is not AttentionPoolLatent or pool.latent_len != 1
                 or pool.pos_embed is not None or pool.pool != "token" or pool.mlp is None
                 or not isinstance(pool.q, nn.Linear) or not isinstance(pool.q_norm, nn.Identity)),
        },
    )  # fmt: skip
    patch = model.patch_embed.proj
    pre_norm = isinstance(model.norm_pre, nn.LayerNorm)
    vit = ViT(
        image_size=model.patch_embed.img_size,
        patch_size=model.patch_embed.patch_size,
        in_channels=patch.in_channels,
        num_classes=model.num_classes,
        dim=model.embed_dim,
        depth=len(model.blocks),
        num_heads=block.attn.num_heads,
        mlp_ratio=block.mlp.fc1.out_features / model.embed_dim,
        positions=None if model.pos_embed is None else "learned",
        pooling=pooling,
        class_token=model.has_class_token,
        num_registers=model.num_reg_tokens,
        qkv_bias=block.attn.qkv.bias is not None,
        qk_norm=isinstance(block.attn.q_norm, nn.LayerNorm),
        layer_scale=None if isinstance(block.ls1, nn.Identity) else 1.0,
        dropout_p=model.pos_drop.p,
        attention_dropout_p=block.attn.attn_drop.p,
        drop_path=getattr(model.blocks[-1].drop_path1, "drop_prob", 0.0),
        patch_dropout=getattr(model.patch_drop, "prob", 0.0),
        embed_norm=pre_norm,
        norm_after_pooling=pooled_norm,
        activation=activation,
        norm_eps=block.norm1.eps,
    )
    return _loaded(vit, _timm_state(model), model)


def from_torchvision(model: torchvision.models.VisionTransformer) -> ViT:
    """attnkit's ViT with the weights of torchvision's VisionTransformer; equal logits.

    Raises:
        TypeError: another class.
        ValueError: it has a convolutional stem or a representation layer before the head.
    """
    from torchvision.models import VisionTransformer

    if type(model) is not VisionTransformer:
        raise TypeError(
            f"model: expected torchvision's VisionTransformer, got {type(model).__qualname__}"
        )
    _refuse(
        model,
        {
            "a convolutional stem": not isinstance(model.conv_proj, nn.Conv2d),
            "a representation layer before the head": model.representation_size is not None,
        },
    )
    layers: list[Any] = list(model.encoder.layers)
    vit = ViT(
        image_size=model.image_size,
        patch_size=model.patch_size,
        in_channels=model.conv_proj.in_channels,
        num_classes=model.num_classes,
        dim=model.hidden_dim,
        depth=len(layers),
        num_heads=layers[0].num_heads,
        mlp_ratio=model.mlp_dim / model.hidden_dim,
        dropout_p=model.dropout,
        attention_dropout_p=model.attention_dropout,
        norm_eps=layers[0].ln_1.eps,
    )
    positions = model.encoder.pos_embedding
    state: State = {
        "class_token": model.class_token + positions[:, :1],
        "position_table": positions[:, 1:],
        **_module_state("patch_embed", model.conv_proj),
        **_module_state("norm", model.encoder.ln),
        **_module_state("head", model.heads.head),
    }
    for index, layer in enumerate(layers):
        name = f"blocks.{index}"
        attention = _multihead_state(layer.self_attention)
        state.update({f"{name}.attention.{key}": value for key, value in attention.items()})
        state.update(_module_state(f"{name}.attention_norm", layer.ln_1))
        state.update(_module_state(f"{name}.mlp_norm", layer.ln_2))
        state.update(_module_state(f"{name}.mlp.fc1", layer.mlp[0]))
        state.update(_module_state(f"{name}.mlp.fc2", layer.mlp[3]))
    return _loaded(vit, state, model)


def _timm_state(model: Any) -> State:
    state: State = {
        **_module_state("patch_embed", model.patch_embed.proj),
        **_module_state("embed_norm", model.norm_pre),
        **_module_state("norm", model.norm),
        **_module_state("pooled_norm", model.fc_norm),
        **_module_state("head", model.head),
    }
    # a position of a prefix token is added to that token and to nothing else: it is part of it
    tokens = {"class_token": model.cls_token, "registers": model.reg_token}
    positions = model.pos_embed
    for name, token in tokens.items():
        if token is None:
            continue
        if positions is not None and not model.no_embed_class:
            count = token.shape[1]
            token, positions = token + positions[:, :count], positions[:, count:]
        state[name] = token
    if positions is not None:
        state["position_table"] = positions
    for index, block in enumerate(model.blocks):
        parts = {
            "attention_norm": block.norm1,
            "attention.in_proj": block.attn.qkv,
            "attention.query_norm": block.attn.q_norm,
            "attention.key_norm": block.attn.k_norm,
            "attention.out_proj": block.attn.proj,
            "attention_scale": block.ls1,
            "mlp_norm": block.norm2,
            "mlp": block.mlp,
            "mlp_scale": block.ls2,
        }
        for name, part in parts.items():
            state.update(_module_state(f"blocks.{index}.{name}", part))
    if model.attn_pool is not None:
        pool = model.attn_pool
        state["pool.query"] = pool.latent
        for kind in ("weight", "bias"):
            halves = [getattr(pool.q, kind), getattr(pool.kv, kind)]
            state[f"pool.attention.in_proj.{kind}"] = torch.cat(halves)
        for name, part in (("attention.out_proj", pool.proj), ("norm", pool.norm)):
            state.update(_module_state(f"pool.{name}", part))
        state.update(_module_state("pool.mlp", pool.mlp))
    return state


def _multihead_state(module: nn.MultiheadAttention) -> State:
    state = _module_state("out_proj", module.out_proj)
    if module.in_proj_weight is not None:
        state["in_proj.weight"] = module.in_proj_weight
        if module.in_proj_bias is not None:
            state["in_proj.bias"] = module.in_proj_bias
        return state
    for name, letter in (("query", "q"), ("key", "k"), ("value", "v")):
        state[f"{name}_proj.weight"] = getattr(module, f"{letter}_proj_weight")
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.chunk(3)
        names = ("query_proj.bias", "key_proj.bias", "value_proj.bias")
        state.update(zip(names, biases, strict=True))
    return state


def _module_state(name: str, module: nn.Module) -> State:
    return {f"{name}.{key}": value for key, value in module.state_dict().items()}


def _activation(module: nn.Module) -> str | None:
    if not isinstance(module, nn.GELU):
        return None
    return "gelu_tanh" if module.approximate == "tanh" else "gelu"


def _refuse(module: nn.Module, reasons: dict[str, bool]) -> None:
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(f"{type(module).__name__} cannot be carried over: {'; '.join(found)}")


def _loaded(ours: Any, state: State, theirs: nn.Module) -> Any:
    """Ours with the state, in the dtype, place and mode of theirs."""
    ours = ours.to(next(theirs.parameters()))
    load_matching(ours, state, type(theirs).__name__)
    return ours.train(theirs.training)
