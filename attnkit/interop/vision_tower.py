"""A vision tower of transformers with a linear classifier, its attention computed by attnkit."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least, in_a_line, pair
from attnkit.core.names import nearest
from attnkit.core.running import evaluating
from attnkit.interop.conversion import shortened
from attnkit.interop.transformers import NAME, register_transformers
from attnkit.models.preprocessing import VERSION, num_channels, tower_facts
from attnkit.models.weights import HUB, asking_hub, reason

_log = logging.getLogger(__name__)
TOWERS = (
    "aimv2_vision_model", "beit", "clip_vision_model", "data2vec-vision", "deit", "dinov2",
    "dinov2_with_registers", "dinov3_vit", "ijepa", "mlcd_vision_model",
    "siglip_vision_model", "swin", "swinv2", "vit", "vit_mae", "vit_msn",
)  # fmt: skip
"""transformers' names of the towers; a configuration may build no other of its models."""
_NEW = ("pooler.", "embeddings.mask_token")
"""Weights that may be missing, since their modules are removed below or not used."""

_CLASS_TOKENS = ("embeddings.cls_token", "embeddings.class_embedding")


class VisionTower(nn.Module):
    """A vision tower of transformers and a linear head: head(pooled(images)).

        model = attnkit.interop.VisionTower(weights="FOLDER", num_classes=5)

    Pooled is the tower's `pooler_output`; if it has none, its class token; if it has none, the mean
    of its tokens. A pooler of a dense layer and tanh, as in ViT, is removed: it was trained for no
    classes, or not at all. The head is new. Attention is computed by attnkit, through transformers'
    interface, and in Swin V2 and Data2Vec by `attnkit.replace_attention`.

    Args:
        num_classes: number of logits.
        weights: a folder that `save_pretrained` wrote, or `hf-hub:NAME`; of CLIP and SigLIP the
            vision tower is taken. None: random weights for `config`. No code in them is run.
        config: the settings of the tower as in transformers' `config.json`, with `model_type`;
            without `transformers_version` each must be known to its class. None: those beside the
            weights.
        image_size: side, or [height, width], in pixels; for another size than the tower's own its
            positions are interpolated, if the tower can. None: its own.
        in_channels: channels of the images.

    Raises:
        ValueError: transformers is not installed; weights that cannot be loaded or do not fit; a
            model that is no such tower; settings that are unknown or cannot be built; or a size or
            number of channels that the tower cannot take.
    """

    tower: Any

    def __init__(
        self,
        *,
        num_classes: int,
        weights: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
        image_size: int | Sequence[int] | None = None,
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        at_least(1, num_classes=num_classes)
        try:
            register_transformers()
        except ImportError as error:
            raise ValueError(
                "VisionTower needs transformers: pip install 'attnkit[transformers]'"
            ) from error
        source = "weights" if config is None else "config"
        if config is None:
            config = _config_of(weights)
        if not isinstance(config, Mapping):
            got = in_a_line(config)
            raise ValueError(f"config: expected the settings of a config.json, got {got}")
        kind = config.get("model_type")
        if kind not in TOWERS:
            raise ValueError(f"{source}: expected one of {', '.join(TOWERS)}, got {kind!r}")
        try:
            own = num_channels(config)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
        if own != in_channels:
            raise ValueError(
                f"in_channels: this {kind} takes {own}, got {in_channels}; data.in_channels={own}"
            )
        self.tower = _tower(config, weights)
        size = self.tower.config.image_size if image_size is None else image_size
        names = [name for name, _ in self.tower.named_parameters()]
        self.has_class_token = any(name.endswith(_CLASS_TOKENS) for name in names)
        parameters = inspect.signature(self.tower.forward).parameters
        is_own = pair("image_size", size) == pair("image_size", self.tower.config.image_size)
        self.interpolates = "interpolate_pos_encoding" in parameters and not is_own
        dim = self._num_features(kind, (1, in_channels, *pair("image_size", size)))
        self.head = nn.Linear(dim, num_classes)

    def forward(
        self, images: Annotated[Tensor, "batch channels height width"]
    ) -> Annotated[Tensor, "batch classes"]:
        return self.head(self.pooled(images))

    def pooled(
        self, images: Annotated[Tensor, "batch channels height width"]
    ) -> Annotated[Tensor, "batch dim"]:
        """Return one vector for each image, which the head reads."""
        options = {"interpolate_pos_encoding": True} if self.interpolates else {}
        found = self.tower(pixel_values=images, **options)
        pooled = getattr(found, "pooler_output", None)
        if pooled is not None:
            return pooled
        tokens = found.last_hidden_state
        return tokens[:, 0] if self.has_class_token else tokens.mean(dim=1)

    def _num_features(self, kind: str, shape: tuple[int, ...]) -> int:
        try:
            with evaluating(self), torch.no_grad():
                return self.pooled(torch.zeros(shape)).shape[1]
        except Exception as error:  # shapes that do not match, whatever the tower raises
            own = self.tower.config.image_size
            raise ValueError(
                f"image_size: {kind} cannot take {shape[2]} x {shape[3]} pixels "
                f"({reason(error)}); its own is {own}"
            ) from error


def _config_of(weights: str | Path | None) -> dict[str, Any]:
    if weights is None:
        raise ValueError(
            f"weights: expected a folder that save_pretrained of transformers wrote, or {HUB}NAME"
        )
    try:
        return tower_facts(weights)["config"]
    except ValueError as error:
        raise ValueError(f"weights: {error}") from error


def _tower(config: Mapping[str, Any], weights: str | Path | None) -> nn.Module:
    from transformers import AutoModel

    settings = _settings(config)
    # every model has "eager"; a configuration cannot name a kernel that would be downloaded
    options = {"attn_implementation": "eager", "trust_remote_code": False}
    if weights is None:
        with _naming_config(settings.model_type):
            tower: Any = AutoModel.from_config(settings, **options)
    else:
        name, _, revision = str(weights).removeprefix(HUB).partition("@")
        name, revision = (name, revision) if str(weights).startswith(HUB) else (str(weights), "")
        options |= {"revision": revision} if revision else {}
        try:
            with asking_hub(), _quietly():
                tower, found = AutoModel.from_pretrained(
                    name,
                    config=settings,
                    dtype=torch.float32,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below
                    **options,
                )
        except Exception as error:  # errors of the hub, of files, of shapes
            raise ValueError(f"weights: {weights} cannot be loaded: {reason(error)}") from error
        if unlike := sorted(found["mismatched_keys"]):
            key, there, here = unlike[0]
            more = f", and {len(unlike) - 1} more" if len(unlike) > 1 else ""
            raise ValueError(
                f"weights: {weights} does not fit the config: {key} is {list(there)} there, "
                f"{list(here)} here{more}"
            )
        if lost := [key for key in sorted(found["missing_keys"]) if not key.startswith(_NEW)]:
            raise ValueError(f"weights: {weights} lacks {shortened(lost)}")
        if left := sorted({key.split(".")[0] for key in found["unexpected_keys"]}):
            _log.info("weights: %s: not used: %s; the head is new", weights, ", ".join(left))
    if hasattr(getattr(tower, "pooler", None), "dense"):
        tower.pooler = None
    if tower._can_set_attn_implementation():
        tower.set_attn_implementation(NAME)
    else:
        from attnkit.surgery.replace import replace_attention

        replace_attention(tower)
    return tower.train()


def _settings(config: Mapping[str, Any]) -> Any:
    """Return the configuration object of transformers."""
    from transformers import CONFIG_MAPPING, AutoConfig

    # ViT-MAE hides patches at random; its encoder is a ViT, as transformers' own pages load it
    kind = "vit" if config["model_type"] == "vit_mae" else config["model_type"]
    if VERSION not in config:
        known = CONFIG_MAPPING[config["model_type"]]()
        if unknown := [name for name in config if not hasattr(known, name)]:
            hint = nearest(unknown[0], (name for name in vars(known) if not name.startswith("_")))
            raise ValueError(f"config: {kind} has no {unknown[0]!r}{hint}")
    with _quietly(), _naming_config(kind):
        # `pooled` reads by name; requested in the call, DINOv2 and Swin would not pass it on
        return AutoConfig.for_model(**{**config, "model_type": kind, "return_dict": True})


@contextmanager
def _naming_config(kind: str) -> Iterator[None]:
    """Return a context in which any error about a configuration becomes a ValueError in a line."""
    try:
        yield
    except Exception as error:
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        message = (name + " ".join(str(error).split()))[:200]
        raise ValueError(f"config: {kind} cannot be built: {message}") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Return a context without transformers' bars and its table of unused tensors."""
    from transformers.utils import logging as theirs

    level, has_bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(theirs.CRITICAL)
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if has_bars:
            theirs.enable_progress_bar()
