"""Layout in, attention block, layout out."""

from attnkit.layers.block import TransformerBlock
from attnkit.layers.patch import PatchEmbedding
from attnkit.layers.pooling import AttentionPool
from attnkit.layers.sparse import SparseDropout, SparseLinear

__all__ = [
    "AttentionPool",
    "PatchEmbedding",
    "SparseDropout",
    "SparseLinear",
    "TransformerBlock",
]
