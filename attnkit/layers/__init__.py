"""Layout in, attention block, layout out."""

from attnkit.layers.bam import BAM
from attnkit.layers.block import TransformerBlock
from attnkit.layers.cbam import CBAM, CBAMChannelGate, CBAMSpatialGate
from attnkit.layers.channel import (
    ChannelAttention,
    CrossCovarianceAttention,
    TransposedAttention,
)
from attnkit.layers.combined import Combined, GatedSum
from attnkit.layers.context import ContextAttention
from attnkit.layers.coordinate import CoordinateAttention
from attnkit.layers.dual import DualAttention
from attnkit.layers.efficient_channel import EfficientChannelAttention
from attnkit.layers.gate import Gate, capture_gates
from attnkit.layers.graph import GraphAttention
from attnkit.layers.graph_block import GraphBlock
from attnkit.layers.patch import PatchEmbedding
from attnkit.layers.pooling import AttentionPool
from attnkit.layers.sparse import SparseDropout, SparseLinear
from attnkit.layers.spatial import SpatialAttention
from attnkit.layers.squeeze_excitation import SCSE, SpatialExcitation, SqueezeExcitation

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
    "PatchEmbedding",
    "SparseDropout",
    "SparseLinear",
    "SpatialAttention",
    "SpatialExcitation",
    "SqueezeExcitation",
    "TransformerBlock",
    "TransposedAttention",
    "capture_gates",
]
