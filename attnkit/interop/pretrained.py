"""Networks with pretrained weights: timm's by name, and `ViT` with weights of timm, of a file, a
folder or the hub."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from timm.models import adapt_input_conv
from torch import Tensor, nn

from attnkit.interop.conversion import shortened
from attnkit.interop.vision import from_timm, named_as_ours
from attnkit.models.backbones import timm_backbone
from attnkit.models.vit import ViT
from attnkit.models.weights import (
    existing,
    is_hub,
    is_name,
    misfits,
    of_vit,
    read_source,
    read_weights,
)

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


_log = logging.getLogger(__name__)
# Settings that a file does not tell; they are taken to be those of the model.
_UNSAID = ("num_heads", "pooling", "activation", "norm_eps")


class PretrainedViT(ViT):
    """`ViT` with optional pretrained weights, timm's or its own.

    Positions and patches are resampled to its image and patch size, the first layer is adapted to
    its channels. A head for another number of classes is replaced by a new one, and parameters that
    the pretrained network lacks, such as those of a learned `score`, start untrained: the logger
    `attnkit.interop.timm_network` says so. With the same settings the logits are equal to
    the pretrained network's (see `attnkit.interop.from_timm`).

    Args:
        pretrained: None: no weights. Or a name of timm's registry (`vit_small_patch16_224`) with
            weights, `hf-hub:NAME` or a Hugging Face folder of such a network, or a file: a state
            dict of timm's Vision Transformer or of `ViT`. No code is run.
        **options: arguments of `ViT`.

    Raises:
        ValueError: weights that cannot be loaded, or that belong to another network: every setting
            that differs is named, with both sides.
    """

    def __init__(self, *, pretrained: str | Path | None = None, **options: Any) -> None:
        super().__init__(**options)
        if pretrained is None:
            return
        donor = self._donor(str(pretrained), options)
        _check_settings(str(pretrained), _settings(donor), _settings(self))
        donor.resize(self.image_size, self.patch_embed.patch_size)
        self._take_over(str(pretrained), donor)

    def _donor(self, given: str, options: dict[str, Any]) -> ViT:
        """Return the pretrained network as a `ViT` of its own size."""
        channels = self.patch_embed.weight.shape[1]
        if is_name(given):
            theirs = timm_backbone(given, channels, self.num_classes, pretrained=True)
        else:
            try:
                source = read_source(given)
                if source.architecture is None and not is_hub(given) and existing(given).is_file():
                    return self._of_state(given, of_vit(read_weights(given)), options)
            except ValueError as error:
                raise ValueError(f"pretrained: {error}") from error
            if source.architecture is None:
                raise ValueError(
                    f"pretrained: {given}: its config.json does not name a network of timm"
                )
            own = ("num_classes", "in_chans", "drop_rate", "drop_path_rate")
            arguments = {k: v for k, v in source.arguments.items() if k not in own}
            theirs = timm_backbone(
                source.architecture, channels, self.num_classes, weights=given, **arguments
            )
        try:
            return from_timm(theirs)  # type: ignore[return-value]
        except (TypeError, ValueError) as error:
            raise ValueError(f"pretrained: {given}: {error}") from error

    def _of_state(self, given: str, state: dict[str, Tensor], options: dict[str, Any]) -> ViT:
        if "patch_embed.proj.weight" in state:
            prefix = sum(state[n].shape[1] for n in ("cls_token", "reg_token") if n in state)
            count = state["pos_embed"].shape[1] if "pos_embed" in state else prefix
            has_positions = _side(count) is None or _side(count - prefix) is not None
            state = named_as_ours(state, prefix_has_positions=has_positions)
        if "patch_embed.weight" not in state or state["patch_embed.weight"].ndim != 4:
            raise ValueError(f"{given} holds no Vision Transformer under timm's or attnkit's names")
        patches = state["patch_embed.weight"]
        channels, patch = self.patch_embed.weight.shape[1], tuple(patches.shape[2:])
        if patches.shape[1] != channels:
            state["patch_embed.weight"] = adapt_input_conv(channels, patches, patches.shape[1])
        side = _side(state["position_table"].shape[1]) if "position_table" in state else 1
        if side is None:
            raise ValueError(f"{given}: its grid of positions is not square")
        unsaid = {name: value for name, value in _settings(self).items() if name in _UNSAID}
        _check_settings(given, {**_settings_of_state(state), **unsaid}, _settings(self))
        head = state.get("head.weight")
        donor = ViT(
            **{
                **{name: value for name, value in options.items() if name != "score"},
                "image_size": (side * patch[0], side * patch[1]),
                "patch_size": patch,
                "in_channels": channels,
                "num_classes": 0 if head is None else len(head),
            }
        )
        try:
            donor.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(f"{given} does not fit: {misfits(error)}") from error
        return donor

    def _take_over(self, given: str, donor: ViT) -> None:
        here, state = self.state_dict(), donor.state_dict()
        if donor.num_classes != self.num_classes:
            state = {n: tensor for n, tensor in state.items() if not n.startswith("head.")}
            _log.info(
                "pretrained: %s: its head for %d classes is replaced by one for %d",
                given, donor.num_classes, self.num_classes,
            )  # fmt: skip
        new = [name for name in here if name not in state and not name.startswith("head.")]
        if new:
            _log.info("pretrained: %s has no %s: these start untrained", given, shortened(new))
        self.load_state_dict(state, strict=False)


def _settings(vit: ViT) -> dict[str, Any]:
    """Return the settings that define the network, by argument names; sizes of images do not."""
    block: Any = vit.blocks[0]
    return {
        **_settings_of_state(vit.state_dict()),
        "num_heads": vit.dim // vit.head_dim,
        "pooling": vit.pooling,
        "activation": "gelu" if block.mlp.act.approximate == "none" else "gelu_tanh",
        "norm_eps": block.attention_norm.eps,
    }


def _settings_of_state(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the settings of a `ViT` that its parameters show, by argument names."""
    dim = len(state["patch_embed.weight"])
    hidden = state.get("blocks.0.mlp.fc1.weight")
    registers = state.get("registers")
    return {
        "dim": dim,
        "depth": len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
        "mlp_ratio": None if hidden is None else len(hidden) / dim,
        "positions": "learned" if "position_table" in state else None,
        "class_token": "class_token" in state,
        "num_registers": 0 if registers is None else registers.shape[1],
        "qkv_bias": "blocks.0.attention.in_proj.bias" in state,
        "qk_norm": "blocks.0.attention.query_norm.weight" in state,
        "layer_scale": 1.0 if "blocks.0.attention_scale.gamma" in state else None,
        "embed_norm": "embed_norm.weight" in state,
        "norm_after_pooling": "pooled_norm.weight" in state,
    }


def _check_settings(given: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    differ = [name for name in there if there[name] != here[name]]
    if differ:
        sides = ", ".join(f"{name} is {there[name]} there, {here[name]} here" for name in differ)
        change = " ".join(f"model.{name}={json.dumps(there[name])}" for name in differ)
        raise ValueError(f"pretrained: {given} is another network: {sides}; {change}")


def _side(count: int) -> int | None:
    """Return the side of a square grid with `count` positions; None if it is not square."""
    side = math.isqrt(max(count, 0))
    return side if side and side**2 == count else None
