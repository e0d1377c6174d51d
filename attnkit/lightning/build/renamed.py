"""What configurations, checkpoints and exports of before name otherwise, so that they still work.

Files name public names only (`attnkit.ViT`, `attnkit.lightning.EMA`), so that code may move. Before
version 0.2 some named the file a class was written in; this table leads from those to the public
names, and from a public name that is now another.
"""

import warnings
from collections.abc import Mapping
from typing import Any

_FORMER = {
    "attnkit.launch.metrics_csv.MetricsCSV": "attnkit.lightning.MetricsCSV",
    "attnkit.launch.progress.Progress": "attnkit.lightning.Progress",
    "attnkit.launch.pruning.Pruning": "attnkit.lightning.Pruning",
    "attnkit.launch.wandb_logger.WandbRun": "attnkit.lightning.WandbRun",
    "attnkit.layers.bam.BAM": "attnkit.layers.BAM",
    "attnkit.layers.block.TransformerBlock": "attnkit.layers.TransformerBlock",
    "attnkit.layers.cbam.CBAMChannelGate": "attnkit.layers.CBAMChannelGate",
    "attnkit.layers.cbam.CBAMSpatialGate": "attnkit.layers.CBAMSpatialGate",
    "attnkit.layers.cbam.CBAM": "attnkit.layers.CBAM",
    "attnkit.layers.channel.ChannelAttention": "attnkit.layers.ChannelAttention",
    "attnkit.layers.channel.CrossCovarianceAttention": "attnkit.layers.CrossCovarianceAttention",
    "attnkit.layers.channel.TransposedAttention": "attnkit.layers.TransposedAttention",
    "attnkit.layers.combined.GatedSum": "attnkit.layers.GatedSum",
    "attnkit.layers.combined.Combined": "attnkit.layers.Combined",
    "attnkit.layers.context.ContextAttention": "attnkit.layers.ContextAttention",
    "attnkit.layers.coordinate.CoordinateAttention": "attnkit.layers.CoordinateAttention",
    "attnkit.layers.dual.DualAttention": "attnkit.layers.DualAttention",
    "attnkit.layers.efficient_channel.EfficientChannelAttention": (
        "attnkit.layers.EfficientChannelAttention"
    ),
    "attnkit.layers.gate.Gate": "attnkit.layers.Gate",
    "attnkit.layers.graph.GraphAttention": "attnkit.layers.GraphAttention",
    "attnkit.layers.graph_block.GraphBlock": "attnkit.layers.GraphBlock",
    "attnkit.layers.patch.PatchEmbedding": "attnkit.layers.PatchEmbedding",
    "attnkit.layers.pooling.AttentionPool": "attnkit.layers.AttentionPool",
    "attnkit.layers.sparse.SparseDropout": "attnkit.layers.SparseDropout",
    "attnkit.layers.sparse.SparseLinear": "attnkit.layers.SparseLinear",
    "attnkit.layers.spatial.SpatialAttention": "attnkit.layers.SpatialAttention",
    "attnkit.layers.squeeze_excitation.SqueezeExcitation": "attnkit.layers.SqueezeExcitation",
    "attnkit.layers.squeeze_excitation.SpatialExcitation": "attnkit.layers.SpatialExcitation",
    "attnkit.layers.squeeze_excitation.SCSE": "attnkit.layers.SCSE",
    "attnkit.lightning.AttentionMaps": "attnkit.Interpret",
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


def without_former_default(target: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments without the position_std that conf/model/vit.yaml gave with all positions.

    Before version 0.2 it was ignored beside positions that are not learned; today it is refused.
    """
    if current(target) not in ("attnkit.ViT", "attnkit.ViTEncoder"):
        return arguments
    is_learned = arguments.get("positions", "learned") in ("learned", "factorized2d")
    if is_learned or arguments.get("position_std") != 0.5:
        return arguments
    warnings.warn(
        "position_std: 0.5 is left out, for these positions are not learned", stacklevel=2
    )
    return {name: value for name, value in arguments.items() if name != "position_std"}


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
