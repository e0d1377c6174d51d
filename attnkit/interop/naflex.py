"""timm's NaFlexViT as timm's VisionTransformer of the same weights, for images of one size."""

from typing import Any

from torch import Tensor, nn

from attnkit.interop.carry import check_class, has_hooks, refuse


def as_vision_transformer(model: Any) -> nn.Module:
    """A `VisionTransformer` that shares the parameters of a `NaFlexVit`.

    Its images have the size of the grid of the learned positions, on which both compute the same.

    Raises:
        TypeError: the embedding is not `NaFlexEmbeds` itself.
        ValueError: the model has a part that a `VisionTransformer` does not; all are named.
    """
    from timm.models.naflexvit import NaFlexEmbeds
    from timm.models.vision_transformer import VisionTransformer

    embeds = model.embeds
    check_class(embeds, NaFlexEmbeds)
    resampling = (
        embeds.pos_embed_interp_mode,
        embeds.pos_embed_antialias,
        embeds.pos_embed_align_corners,
        embeds.pos_embed_ar_preserving,
        embeds.pos_embed_use_grid_sample,
    )
    refuse(
        model,
        {
            f"positions {embeds.pos_embed_type!r}, expected 'learned'": embeds.pos_embed is None,
            "positions that are not resampled bicubic and antialiased to the grid of the image": (
                resampling != ("bicubic", True, False, False, False)
            ),
            "rotary positions": model.rope is not None,
            "norms in the embedding": embeds.norm_input is not None
            or not isinstance(embeds.norm, nn.Identity),
            "patches of several sizes": embeds.patch_interpolator is not None,
            "hooks": has_hooks(model) or has_hooks(embeds),
        },
    )
    rows, columns = embeds.pos_embed.shape[1:3]
    height, width = embeds.patch_size
    like: Any = VisionTransformer(
        img_size=(rows * height, columns * width),
        patch_size=embeds.patch_size,
        in_chans=embeds.in_chans,
        num_classes=model.num_classes,
        global_pool=model.global_pool,
        embed_dim=model.embed_dim,
        depth=0,
        num_heads=1,
        class_token=model.has_class_token,
        reg_tokens=model.num_reg_tokens,
        no_embed_class=True,
        pos_drop_rate=embeds.pos_drop.p,
        pre_norm=isinstance(model.norm_pre, nn.LayerNorm),
    )
    for name in ("blocks", "norm_pre", "norm", "fc_norm", "attn_pool", "head_drop", "head"):
        setattr(like, name, getattr(model, name))
    for name in ("pool_include_prefix", "grad_checkpointing"):
        setattr(like, name, getattr(model, name))
    like.patch_drop = model.patch_drop or nn.Identity()
    like.cls_token, like.reg_token = embeds.cls_token, embeds.reg_token
    like.pos_embed = _like(embeds.pos_embed, embeds.pos_embed.flatten(1, 2))
    like.patch_embed.proj.weight = _like(embeds.proj.weight, _as_convolution(embeds))
    like.patch_embed.proj.bias = embeds.proj.bias
    return like.train(model.training)


def _as_convolution(embeds: Any) -> Tensor:
    weight = embeds.proj.weight
    if weight.ndim == 4:
        return weight
    height, width = embeds.patch_size
    if embeds.channels_last:
        return weight.reshape(-1, height, width, embeds.in_chans).permute(0, 3, 1, 2)
    return weight.reshape(-1, embeds.in_chans, height, width)


def _like(parameter: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().contiguous(), requires_grad=parameter.requires_grad)
