"""What configurations, checkpoints and exports of before name otherwise, so that they still work.

Files name public names only (`attnkit.ViT`, `attnkit.lightning.EMA`), so that code may move. Before
version 0.2 some named the file a class was written in; this table leads from those to the public
names. It is closed: nothing new is written with a path of a file.
"""

import warnings
from collections.abc import Mapping
from typing import Any

_FORMER = {
    "attnkit.launch.metrics_csv.MetricsCSV": "attnkit.lightning.MetricsCSV",
    "attnkit.launch.progress.Progress": "attnkit.lightning.Progress",
    "attnkit.launch.pruning.Pruning": "attnkit.lightning.Pruning",
    "attnkit.launch.wandb_logger.WandbRun": "attnkit.lightning.WandbRun",
    "attnkit.lightning.ema.EMA": "attnkit.lightning.EMA",
    "attnkit.lightning.optim.warmup_cosine": "attnkit.lightning.warmup_cosine",
    "attnkit.models.backbones.timm_backbone": "attnkit.models.timm_backbone",
    "attnkit.models.captioner.Captioner": "attnkit.Captioner",
    "attnkit.models.gat.GAT": "attnkit.GAT",
    "attnkit.models.graph_transformer.GraphTransformer": "attnkit.GraphTransformer",
    "attnkit.models.hard_decoder.HardRecurrentDecoder": "attnkit.HardRecurrentDecoder",
    "attnkit.models.image_encoders.CNNEncoder": "attnkit.CNNEncoder",
    "attnkit.models.image_encoders.TimmEncoder": "attnkit.TimmEncoder",
    "attnkit.models.image_encoders.ViTEncoder": "attnkit.ViTEncoder",
    "attnkit.models.recurrent_decoder.RecurrentDecoder": "attnkit.RecurrentDecoder",
    "attnkit.models.resnet.ResNet": "attnkit.models.ResNet",
    "attnkit.models.transformer_decoder.TransformerDecoder": "attnkit.TransformerDecoder",
    "attnkit.models.vit.ViT": "attnkit.ViT",
}


# An option, and the choices of another that it belongs to, the default first. Before version 0.2 it
# was ignored beside the other choices, and conf/model/vit.yaml gave position_std with all of them.
_BELONGS = {
    "attnkit.ViT": ("position_std", "positions", ("learned", "factorized2d")),
    "attnkit.ViTEncoder": ("position_std", "positions", ("learned", "factorized2d")),
    "attnkit.RecurrentDecoder": ("attention_dim", "score", ("additive",)),
    "attnkit.HardRecurrentDecoder": ("attention_dim", "score", ("additive",)),
}


def used(target: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments without one that was ignored before and is refused today, with a warning."""
    if current(target) not in _BELONGS:
        return arguments
    option, other, choices = _BELONGS[current(target)]
    given, choice = arguments.get(option), arguments.get(other, choices[0])
    if given is None or choice in choices:
        return arguments
    warnings.warn(
        f"{option}: {given} is left out, expected it with {other}={' or '.join(choices)} only, "
        f"got {other}={choice}",
        stacklevel=2,
    )
    return {name: value for name, value in arguments.items() if name != option}


def current(target: str) -> str:
    """The name under which a class or function is found today."""
    return _FORMER.get(target, target)


def renewed(node: Any) -> Any:
    """A configuration whose `_target_`s are the names of today."""
    if isinstance(node, list):
        return [renewed(value) for value in node]
    if not isinstance(node, Mapping):
        return node
    return {
        key: current(value) if key == "_target_" and isinstance(value, str) else renewed(value)
        for key, value in node.items()
    }
