"""A classifier of timm by its name, unchanged, or as `ViT` for images of different sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from attnkit.interop.vision import from_timm
from attnkit.models.backbones import timm_backbone

# Parts of timm's attention that `ViT` does not compute, by parts of the names of modules.
_NOT_OURS = {
    "rope": "rotary positions",
    "rotary": "rotary positions",
    "relpos": "relative positions",
    "window": "attention in windows",
    "distilled": "a distillation token",
}


def timm_network(
    name: str,
    in_channels: int,
    num_classes: int,
    *,
    image_size: int | Sequence[int] | None = None,
    pretrained: bool = False,
    weights: str | Path | None = None,
    drop_path: float | None = None,
    native: bool | None = None,
    **options: Any,
) -> nn.Module:
    """Create `timm_backbone`, or with `native` the `ViT` of the same weights, which takes a list of
    images of different sizes; its positions are resampled to each grid (see `from_timm`).

    Args:
        native: whether images keep their own sizes, for plain Vision Transformers with names such
            as `vit_…`, `deit_…` or `naflexvit_…`; None: no.
        the others: as in `timm_backbone`. With `native`, `image_size` is that of the learned
            positions, unless a NaFlexViT has a grid of its own.

    Raises:
        ValueError: as in `timm_backbone`; with `native`, a network of another kind, whose parts
            that a `ViT` lacks are named.
    """
    # the signature names them, since the launcher reads there what it may fill in
    options |= {"image_size": image_size, "pretrained": pretrained, "weights": weights}
    network: Any = timm_backbone(name, in_channels, num_classes, drop_path=drop_path, **options)
    if not native:
        return network
    try:
        vit: Any = from_timm(network)
    except TypeError as error:
        has = "".join(f", with {part}" for part in [", ".join(_parts(network))] if part)
        raise ValueError(
            f"native: {name} is timm's {type(network).__name__}{has}; expected a plain Vision "
            "Transformer, such as vit_small_patch16_224 or naflexvit_base_patch16_gap, or "
            "data.native=false, which resizes images"
        ) from error
    except ValueError as error:
        hint = ""
        if str(error).startswith("patch_size:"):
            (height, width), (patch, _) = (
                network.patch_embed.img_size,
                network.patch_embed.patch_size,
            )
            side = max(patch, min(height, width) // patch * patch)
            hint = f"; data.patch_size={patch} data.image_size={side}"
        raise ValueError(f"native: {name}: {error}{hint}") from error
    vit.native = True
    return vit


def _parts(network: nn.Module) -> dict[str, None]:
    """Return the descriptions in `_NOT_OURS` that apply to the modules of a network, each once."""
    kinds = [f"{name} {type(part).__name__}".lower() for name, part in network.named_modules()]
    named = " ".join(kinds)
    return dict.fromkeys(what for part, what in _NOT_OURS.items() if part in named)
