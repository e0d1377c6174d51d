"""Layout in, attention block, layout out."""

from attnkit.layers.block import TransformerBlock
from attnkit.layers.graph import GraphAttention
from attnkit.layers.graph_block import GraphBlock
from attnkit.layers.patch import PatchEmbedding
from attnkit.layers.pooling import AttentionPool
from attnkit.layers.sparse import SparseDropout, SparseLinear

__all__ = [
    "AttentionPool",
    "GraphAttention",
    "GraphBlock",
    "PatchEmbedding",
    "SparseDropout",
    "SparseLinear",
    "TransformerBlock",
]
