"""A classifier of timm's by its name, as it is, or as our ViT for images of their own sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from attnkit.interop.vision import from_timm
from attnkit.models.backbones import timm_backbone

# What of timm's attention our ViT does not compute, by parts of the names of its modules.
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
    """`timm_backbone`, or with `native` the `ViT` of the same weights, which takes a list of images
    of their own sizes; its positions are resampled to the grid of each (see `from_timm`).

    Args:
        native: whether images keep their own sizes, for names as `vit_…`, `deit_…` or `naflexvit_…`
            of plain Vision Transformers; None: no.
        the others: of `timm_backbone`. With `native`, `image_size` is that of the learned
            positions, unless a NaFlexViT has a grid of its own.

    Raises:
        ValueError: as `timm_backbone`; with `native`, a network of another kind: what it has that
            a `ViT` does not is named.
    """
    # named above, as the launcher reads from a signature what it may fill in
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
    """What of `_NOT_OURS` the modules of a network are, each once."""
    kinds = [f"{name} {type(part).__name__}".lower() for name, part in network.named_modules()]
    named = " ".join(kinds)
    return dict.fromkeys(what for part, what in _NOT_OURS.items() if part in named)
