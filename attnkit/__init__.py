"""attnkit: vision and graph attention for PyTorch Lightning, on one block with every kernel.

This file is the public table and nothing else. Names are imported when first used, so that
`import attnkit` and the command line's help do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "attend": "attnkit.core.attend",
    "masks": "attnkit.core.masks",
    "Causal": "attnkit.core.masks",
    "Padding": "attnkit.core.masks",
    "Dense": "attnkit.core.masks",
    "Window": "attnkit.core.sparse_masks",
    "Window2d": "attnkit.core.sparse_masks",
    "Packed": "attnkit.core.sparse_masks",
    "Blocks": "attnkit.core.sparse_masks",
    "Edges": "attnkit.core.graph",
    "EdgeFeatures": "attnkit.core.graph",
    "edge_weights": "attnkit.core.edge_weights",
    "ALiBi": "attnkit.core.biases",
    "RelativeBias1d": "attnkit.core.biases",
    "RelativeBias2d": "attnkit.core.biases",
    "sincos_1d": "attnkit.core.positions",
    "sincos_2d": "attnkit.core.positions",
    "LearnedPositions1d": "attnkit.core.learned_positions",
    "LearnedPositions2d": "attnkit.core.learned_positions",
    "FactorizedPositions2d": "attnkit.core.learned_positions",
    "Rotary1d": "attnkit.core.rotary",
    "Rotary2d": "attnkit.core.rotary",
    "scores": "attnkit.core.scores",
    "ScaledDot": "attnkit.core.scores",
    "General": "attnkit.core.scores",
    "Cosine": "attnkit.core.scores",
    "Gaussian": "attnkit.core.scores",
    "Additive": "attnkit.core.scores",
    "learned_scores": "attnkit.core.learned_scores",
    "NadarayaWatson": "attnkit.core.nadaraya_watson",
    "normalizers": "attnkit.core.normalizers",
    "Softmax": "attnkit.core.normalizers",
    "Hard": "attnkit.core.normalizers",
    "Linear": "attnkit.core.normalizers",
    "DeltaRule": "attnkit.core.normalizers",
    "KeyValueCache": "attnkit.core.cache",
    "delta_rule": "attnkit.core.delta_rule",
    "record_draws": "attnkit.core.hard",
    "UnsupportedError": "attnkit.core.backends",
    "explain_backends": "attnkit.core.backends",
    "record_backends": "attnkit.core.record",
    "attention_weights": "attnkit.core.weights",
    "capture_attention": "attnkit.core.weights",
    "count_multiply_adds": "attnkit.core.multiply_adds",
    "MultiHeadAttention": "attnkit.core.multihead",
    "AttentionPool": "attnkit.layers.pooling",
    "SpatialAttention": "attnkit.layers.spatial",
    "ChannelAttention": "attnkit.layers.channel",
    "CrossCovarianceAttention": "attnkit.layers.channel",
    "TransposedAttention": "attnkit.layers.channel",
    "ContextAttention": "attnkit.layers.context",
    "DualAttention": "attnkit.layers.dual",
    "GraphAttention": "attnkit.layers.graph",
    "Gate": "attnkit.layers.gate",
    "capture_gates": "attnkit.layers.gate",
    "SCSE": "attnkit.layers.squeeze_excitation",
    "SpatialExcitation": "attnkit.layers.squeeze_excitation",
    "SqueezeExcitation": "attnkit.layers.squeeze_excitation",
    "EfficientChannelAttention": "attnkit.layers.efficient_channel",
    "CBAM": "attnkit.layers.cbam",
    "CBAMChannelGate": "attnkit.layers.cbam",
    "CBAMSpatialGate": "attnkit.layers.cbam",
    "BAM": "attnkit.layers.bam",
    "CoordinateAttention": "attnkit.layers.coordinate",
    "Combined": "attnkit.layers.combined",
    "GatedSum": "attnkit.layers.combined",
    "ViT": "attnkit.models.vit",
    "Captioner": "attnkit.models.captioner",
    "CNNEncoder": "attnkit.models.image_encoders",
    "ViTEncoder": "attnkit.models.image_encoders",
    "TimmEncoder": "attnkit.models.image_encoders",
    "TransformerDecoder": "attnkit.models.transformer_decoder",
    "RecurrentDecoder": "attnkit.models.recurrent_decoder",
    "HardRecurrentDecoder": "attnkit.models.hard_decoder",
    "generate": "attnkit.models.decoding",
    "GraphTransformer": "attnkit.models.graph_transformer",
    "GAT": "attnkit.models.gat",
    "checks": "attnkit.checks",
    "check_attention": "attnkit.checks.run",
    "assert_attention": "attnkit.checks.run",
    "insert_attention": "attnkit.surgery.insert",
    "remove_attention": "attnkit.surgery.insert",
    "replace_attention": "attnkit.surgery.replace",
    "interop": "attnkit.interop",
    "lightning": "attnkit.lightning",
    "load": "attnkit.lightning.export.exported",
    "metrics": "attnkit.metrics",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'attnkit' has no attribute {name!r}")
    home = import_module(_HOME[name])
    # a name is an attribute of its home, or the module itself
    globals()[name] = value = getattr(home, name, home)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOME]


if TYPE_CHECKING:
    from attnkit import checks, interop, lightning, metrics
    from attnkit.checks.run import assert_attention, check_attention
    from attnkit.core import learned_scores, masks, normalizers, scores
    from attnkit.core.attend import attend
    from attnkit.core.backends import UnsupportedError, explain_backends
    from attnkit.core.biases import ALiBi, RelativeBias1d, RelativeBias2d
    from attnkit.core.cache import KeyValueCache
    from attnkit.core.delta_rule import delta_rule
    from attnkit.core.edge_weights import edge_weights
    from attnkit.core.graph import EdgeFeatures, Edges
    from attnkit.core.hard import record_draws
    from attnkit.core.learned_positions import (
        FactorizedPositions2d,
        LearnedPositions1d,
        LearnedPositions2d,
    )
    from attnkit.core.masks import Causal, Dense, Padding
    from attnkit.core.multihead import MultiHeadAttention
    from attnkit.core.multiply_adds import count_multiply_adds
    from attnkit.core.nadaraya_watson import NadarayaWatson
    from attnkit.core.normalizers import DeltaRule, Hard, Linear, Softmax
    from attnkit.core.positions import sincos_1d, sincos_2d
    from attnkit.core.record import record_backends
    from attnkit.core.rotary import Rotary1d, Rotary2d
    from attnkit.core.scores import Additive, Cosine, Gaussian, General, ScaledDot
    from attnkit.core.sparse_masks import Blocks, Packed, Window, Window2d
    from attnkit.core.weights import attention_weights, capture_attention
    from attnkit.layers.bam import BAM
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
    from attnkit.layers.pooling import AttentionPool
    from attnkit.layers.spatial import SpatialAttention
    from attnkit.layers.squeeze_excitation import SCSE, SpatialExcitation, SqueezeExcitation
    from attnkit.lightning.export.exported import load
    from attnkit.models.captioner import Captioner
    from attnkit.models.decoding import generate
    from attnkit.models.gat import GAT
    from attnkit.models.graph_transformer import GraphTransformer
    from attnkit.models.hard_decoder import HardRecurrentDecoder
    from attnkit.models.image_encoders import CNNEncoder, TimmEncoder, ViTEncoder
    from attnkit.models.recurrent_decoder import RecurrentDecoder
    from attnkit.models.transformer_decoder import TransformerDecoder
    from attnkit.models.vit import ViT
    from attnkit.surgery.insert import insert_attention, remove_attention
    from attnkit.surgery.replace import replace_attention
