"""Layers: arrange the input as tokens, call the attention block, arrange the output."""

from typing import TYPE_CHECKING

from attnkit.core.names import lazy

if TYPE_CHECKING:
    from attnkit.layers.gates.bam import BAM
    from attnkit.layers.gates.cbam import CBAM, CBAMChannelGate, CBAMSpatialGate
    from attnkit.layers.gates.coordinate import CoordinateAttention
    from attnkit.layers.gates.efficient_channel import EfficientChannelAttention
    from attnkit.layers.gates.gate import Gate, capture_gates
    from attnkit.layers.gates.squeeze_excitation import SCSE, SpatialExcitation, SqueezeExcitation
    from attnkit.layers.graph.attention import GraphAttention
    from attnkit.layers.graph.block import GraphBlock
    from attnkit.layers.graph.han import HANAttention
    from attnkit.layers.graph.hgt import HGTAttention
    from attnkit.layers.graph.receptive_field import ReceptiveField
    from attnkit.layers.graph.rgat import RGATAttention
    from attnkit.layers.graph.sparse import SparseDropout, SparseLinear
    from attnkit.layers.graph.typed_edges import TypedEdges
    from attnkit.layers.maps.channel import (
        ChannelAttention,
        CrossCovarianceAttention,
        TransposedAttention,
    )
    from attnkit.layers.maps.combined import Combined, GatedSum
    from attnkit.layers.maps.context import ContextAttention
    from attnkit.layers.maps.dual import DualAttention
    from attnkit.layers.maps.spatial import SpatialAttention
    from attnkit.layers.tokens.block import TransformerBlock
    from attnkit.layers.tokens.patch import PatchEmbedding
    from attnkit.layers.tokens.pooling import AttentionPool
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
