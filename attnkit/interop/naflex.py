"""timm's NaFlexViT as attnkit's `ViT`, by way of timm's VisionTransformer of the same weights."""

from typing import Any

from torch import Tensor, nn

from attnkit.core.positions.absolute import FactorizedPositions2d, Resampling
from attnkit.interop.conversion import check_class, has_hooks, refuse
from attnkit.models.vit import ViT


def with_positions_of(model: Any, vit: ViT) -> ViT:
    """Give the `ViT` of `as_vision_transformer(model)` the positions of the `NaFlexVit`, learned or
    factorized, which are resampled to images of any size as there; return it."""
    embeds = model.embeds
    vit.native, square = True, embeds.pos_embed_ar_preserving
    vit.resampling = Resampling(embeds.pos_embed_interp_mode, embeds.pos_embed_antialias, square)
    if embeds.pos_embed_type == "factorized":
        tables = embeds.pos_embed_y, embeds.pos_embed_x
        positions = FactorizedPositions2d(vit.grid, vit.dim)
        positions.row_table, positions.column_table = (_like(one, one[0].clone()) for one in tables)
        vit.positions, vit.factorized_positions = "factorized2d", positions
        vit.resampling = Resampling("bilinear", antialias=False, square=square)
    return vit


def as_vision_transformer(model: Any) -> nn.Module:
    """Return a `VisionTransformer` that shares the parameters of a `NaFlexVit`.

    Its images have the size of the grid of the learned positions, for which both compute the same.
    It has no factorized positions.

    Raises:
        TypeError: the embedding is not `NaFlexEmbeds` itself.
        ValueError: the model has parts that a `VisionTransformer` lacks; all are named.
    """
    from timm.models.naflexvit import NaFlexEmbeds
    from timm.models.vision_transformer import VisionTransformer

    embeds = model.embeds
    check_class(embeds, NaFlexEmbeds)
    learned, factorized = embeds.pos_embed is not None, embeds.pos_embed_type == "factorized"
    rows, columns = embeds.pos_embed_grid_size or (1, 1)
    mode = embeds.pos_embed_interp_mode
    refuse(
        model,
        {
            f"positions {embeds.pos_embed_type!r}, expected 'learned' or 'factorized'": (
                not learned and not factorized
            ),
            f"positions resampled by {mode!r}, expected 'bicubic' or 'bilinear'": (
                learned and mode not in ("bicubic", "bilinear")
            ),
            "positions with aligned corners (pos_embed_align_corners)": (
                learned and embeds.pos_embed_align_corners
            ),
            "positions by grid_sample (pos_embed_use_grid_sample)": (
                embeds.pos_embed_use_grid_sample
            ),
            "factorized positions that keep the aspect of a grid that is not square": (
                factorized and embeds.pos_embed_ar_preserving and rows != columns
            ),
            "rotary positions": model.rope is not None,
            "norms in the embedding": embeds.norm_input is not None
            or not isinstance(embeds.norm, nn.Identity),
            "patches of several sizes": embeds.patch_interpolator is not None,
            "hooks": has_hooks(model) or has_hooks(embeds),
        },
    )
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
    like.pos_embed = _like(embeds.pos_embed, embeds.pos_embed.flatten(1, 2)) if learned else None
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
