"""Layout in, attention block, layout out."""

from attnkit.layers.block import TransformerBlock
from attnkit.layers.channel import (
    ChannelAttention,
    CrossCovarianceAttention,
    TransposedAttention,
)
from attnkit.layers.context import ContextAttention
from attnkit.layers.graph import GraphAttention
from attnkit.layers.graph_block import GraphBlock
from attnkit.layers.patch import PatchEmbedding
from attnkit.layers.pooling import AttentionPool
from attnkit.layers.sparse import SparseDropout, SparseLinear
from attnkit.layers.spatial import SpatialAttention

__all__ = [
    "AttentionPool",
    "ChannelAttention",
    "ContextAttention",
    "CrossCovarianceAttention",
    "GraphAttention",
    "GraphBlock",
    "PatchEmbedding",
    "SparseDropout",
    "SparseLinear",
    "SpatialAttention",
    "TransformerBlock",
    "TransposedAttention",
]
