"""Layers: arrange the input as tokens, call the attention block, arrange the output."""

from typing import TYPE_CHECKING

from attnkit.core.names import lazy

if TYPE_CHECKING:
    from attnkit.layers.cbam import BAM, CBAM, CBAMChannelGate, CBAMSpatialGate
    from attnkit.layers.channel import (
        ChannelAttention,
        CrossCovarianceAttention,
        DualAttention,
        TransposedAttention,
    )
    from attnkit.layers.gates import (
        SCSE,
        CoordinateAttention,
        EfficientChannelAttention,
        Gate,
        SpatialExcitation,
        SqueezeExcitation,
        capture_gates,
    )
    from attnkit.layers.graph.attention import GraphAttention
    from attnkit.layers.graph.blocks import GraphBlock, SparseDropout, SparseLinear
    from attnkit.layers.graph.receptive_field import ReceptiveField
    from attnkit.layers.graph.rgat import RGATAttention
    from attnkit.layers.graph.typed_attention import HANAttention, HGTAttention
    from attnkit.layers.graph.typed_edges import TypedEdges
    from attnkit.layers.maps import Combined, GatedSum
    from attnkit.layers.patch import PatchEmbedding
    from attnkit.layers.pooling import AttentionPool
    from attnkit.layers.spatial import ContextAttention, SpatialAttention
    from attnkit.layers.transformer import TransformerBlock
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "BAM",
    "CBAM",
    "SCSE",
    "AttentionPool",
    "CBAMChannelGate",
    "CBAMSpatialGate",
    "ChannelAttention",
    "Combined",
    "ContextAttention",
    "CoordinateAttention",
    "CrossCovarianceAttention",
    "DualAttention",
    "EfficientChannelAttention",
    "Gate",
    "GatedSum",
    "GraphAttention",
    "GraphBlock",
    "HANAttention",
    "HGTAttention",
    "PatchEmbedding",
    "RGATAttention",
    "ReceptiveField",
    "SparseDropout",
    "SparseLinear",
    "SpatialAttention",
    "SpatialExcitation",
    "SqueezeExcitation",
    "TransformerBlock",
    "TransposedAttention",
    "TypedEdges",
    "capture_gates",
]
