"""Former paths of what configurations, checkpoints and exports name, so that old ones still work.

Files name public names only (`attnkit.ViT`, `attnkit.lightning.EMA`), so that code may move. Before
version 0.2 some named the file a class was written in; this table leads from those to the public
names. It is closed: nothing new is written with a path of a file.
"""

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
