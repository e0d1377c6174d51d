"""attnkit: vision and graph attention for PyTorch Lightning, on one block with every kernel.

This file is the public table and nothing else. Names are imported when first used, so that
`import attnkit` and the command line's help do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

_HOME = {
    "attend": "attnkit.core.attend",
    "masks": "attnkit.core.masks",
    "Causal": "attnkit.core.masks.sequences",
    "Padding": "attnkit.core.masks.sequences",
    "Dense": "attnkit.core.masks.base",
    "Window": "attnkit.core.masks.sequences",
    "Window2d": "attnkit.core.masks.grids",
    "Packed": "attnkit.core.masks.sequences",
    "Blocks": "attnkit.core.masks.grids",
    "Edges": "attnkit.core.masks.edges",
    "EdgeFeatures": "attnkit.core.masks.edges",
    "edge_weights": "attnkit.core.kernels.edges.weights",
    "ALiBi": "attnkit.core.positions.biases",
    "RelativeBias1d": "attnkit.core.positions.biases",
    "RelativeBias2d": "attnkit.core.positions.biases",
    "positions": "attnkit.core.positions",
    "sincos_1d": "attnkit.core.positions.absolute",
    "sincos_2d": "attnkit.core.positions.absolute",
    "LearnedPositions1d": "attnkit.core.positions.absolute",
    "LearnedPositions2d": "attnkit.core.positions.absolute",
    "FactorizedPositions2d": "attnkit.core.positions.absolute",
    "Rotary1d": "attnkit.core.positions.rotary",
    "Rotary2d": "attnkit.core.positions.rotary",
    "scores": "attnkit.core.scores",
    "ScaledDot": "attnkit.core.scores.kinds",
    "General": "attnkit.core.scores.kinds",
    "Cosine": "attnkit.core.scores.kinds",
    "Gaussian": "attnkit.core.scores.kinds",
    "Additive": "attnkit.core.scores.additive",
    "learned_scores": "attnkit.core.scores.learned",
    "NadarayaWatson": "attnkit.layers.tokens.nadaraya_watson",
    "normalizers": "attnkit.core.normalizers",
    "Softmax": "attnkit.core.normalizers",
    "Hard": "attnkit.core.normalizers",
    "Linear": "attnkit.core.normalizers",
    "DeltaRule": "attnkit.core.normalizers",
    "KeyValueCache": "attnkit.core.cache",
    "delta_rule": "attnkit.core.kernels.delta_rule",
    "record_draws": "attnkit.core.kernels.hard",
    "UnsupportedError": "attnkit.core.kernels.choose",
    "explain_backends": "attnkit.core.kernels.choose",
    "record_backends": "attnkit.core.kernels.record",
    "record_logits": "attnkit.core.capture.logits",
    "attention_weights": "attnkit.core.weights",
    "capture_attention": "attnkit.core.capture.weights",
    "count_multiply_adds": "attnkit.core.operators.multiply_adds",
    "MultiHeadAttention": "attnkit.core.multihead",
    "AttentionPool": "attnkit.layers.tokens.pooling",
    "SpatialAttention": "attnkit.layers.maps.spatial",
    "ChannelAttention": "attnkit.layers.maps.channel",
    "CrossCovarianceAttention": "attnkit.layers.maps.channel",
    "TransposedAttention": "attnkit.layers.maps.channel",
    "ContextAttention": "attnkit.layers.maps.context",
    "DualAttention": "attnkit.layers.maps.dual",
    "GraphAttention": "attnkit.layers.graph.attention",
    "HANAttention": "attnkit.layers.graph.han",
    "HGTAttention": "attnkit.layers.graph.hgt",
    "RGATAttention": "attnkit.layers.graph.rgat",
    "TypedEdges": "attnkit.layers.graph.typed_edges",
    "Gate": "attnkit.layers.gates.gate",
    "capture_gates": "attnkit.layers.gates.gate",
    "SCSE": "attnkit.layers.gates.squeeze_excitation",
    "SpatialExcitation": "attnkit.layers.gates.squeeze_excitation",
    "SqueezeExcitation": "attnkit.layers.gates.squeeze_excitation",
    "EfficientChannelAttention": "attnkit.layers.gates.efficient_channel",
    "CBAM": "attnkit.layers.gates.cbam",
    "CBAMChannelGate": "attnkit.layers.gates.cbam",
    "CBAMSpatialGate": "attnkit.layers.gates.cbam",
    "BAM": "attnkit.layers.gates.bam",
    "CoordinateAttention": "attnkit.layers.gates.coordinate",
    "Combined": "attnkit.layers.maps.combined",
    "GatedSum": "attnkit.layers.maps.combined",
    "ViT": "attnkit.models.vit",
    "Captioner": "attnkit.models.captioning.captioner",
    "CNNEncoder": "attnkit.models.captioning.image_encoders",
    "ViTEncoder": "attnkit.models.captioning.image_encoders",
    "TimmEncoder": "attnkit.models.captioning.image_encoders",
    "TransformerDecoder": "attnkit.models.captioning.transformer_decoder",
    "RecurrentDecoder": "attnkit.models.captioning.recurrent_decoder",
    "HardRecurrentDecoder": "attnkit.models.captioning.hard_decoder",
    "generate": "attnkit.models.captioning.generate",
    "GraphTransformer": "attnkit.models.graph_transformer",
    "GAT": "attnkit.models.gat",
    "Polynormer": "attnkit.models.polynormer",
    "SGFormer": "attnkit.models.sgformer",
    "finetune": "attnkit.finetune",
    "checks": "attnkit.checks",
    "check_attention": "attnkit.checks.run",
    "assert_attention": "attnkit.checks.run",
    "insert_attention": "attnkit.surgery.insert",
    "remove_attention": "attnkit.surgery.insert",
    "interpret": "attnkit.interpret",
    "diagnose_attention": "attnkit.interpret.diagnosis.diagnose",
    "edge_fidelity": "attnkit.interpret.graphs.fidelity",
    "explain": "attnkit.interpret.explain",
    "Explanation": "attnkit.interpret.explanation",
    "Interpret": "attnkit.interpret.training",
    "replace_attention": "attnkit.surgery.replace",
    "interop": "attnkit.interop",
    "lightning": "attnkit.lightning",
    "run": "attnkit.launch.api",
    "load": "attnkit.lightning.export.exported",
    "metrics": "attnkit.metrics",
    "trust": "attnkit.interpret.trust.judge",
    "Trust": "attnkit.interpret.trust.result",
    "perturbation_curves": "attnkit.interpret.trust.curves",
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
    from attnkit import checks, finetune, interop, interpret, lightning, metrics
    from attnkit.checks.run import assert_attention, check_attention
    from attnkit.core import masks, normalizers, positions, scores
    from attnkit.core.attend import attend
    from attnkit.core.cache import KeyValueCache
    from attnkit.core.capture.logits import record_logits
    from attnkit.core.capture.weights import capture_attention
    from attnkit.core.kernels.choose import UnsupportedError, explain_backends
    from attnkit.core.kernels.delta_rule import delta_rule
    from attnkit.core.kernels.edges.weights import edge_weights
    from attnkit.core.kernels.hard import record_draws
    from attnkit.core.kernels.record import record_backends
    from attnkit.core.masks.base import Dense
    from attnkit.core.masks.edges import EdgeFeatures, Edges
    from attnkit.core.masks.grids import Blocks, Window2d
    from attnkit.core.masks.sequences import Causal, Packed, Padding, Window
    from attnkit.core.multihead import MultiHeadAttention
    from attnkit.core.normalizers import DeltaRule, Hard, Linear, Softmax
    from attnkit.core.operators.multiply_adds import count_multiply_adds
    from attnkit.core.positions.absolute import (
        FactorizedPositions2d,
        LearnedPositions1d,
        LearnedPositions2d,
        sincos_1d,
        sincos_2d,
    )
    from attnkit.core.positions.biases import ALiBi, RelativeBias1d, RelativeBias2d
    from attnkit.core.positions.rotary import Rotary1d, Rotary2d
    from attnkit.core.scores import learned as learned_scores
    from attnkit.core.scores.additive import Additive
    from attnkit.core.scores.kinds import Cosine, Gaussian, General, ScaledDot
    from attnkit.core.weights import attention_weights
    from attnkit.interpret.diagnosis.diagnose import diagnose_attention
    from attnkit.interpret.explain import explain
    from attnkit.interpret.explanation import Explanation
    from attnkit.interpret.graphs.fidelity import edge_fidelity
    from attnkit.interpret.training import Interpret
    from attnkit.interpret.trust.curves import perturbation_curves
    from attnkit.interpret.trust.judge import trust
    from attnkit.interpret.trust.result import Trust
    from attnkit.launch.api import run
    from attnkit.layers.gates.bam import BAM
    from attnkit.layers.gates.cbam import CBAM, CBAMChannelGate, CBAMSpatialGate
    from attnkit.layers.gates.coordinate import CoordinateAttention
    from attnkit.layers.gates.efficient_channel import EfficientChannelAttention
    from attnkit.layers.gates.gate import Gate, capture_gates
    from attnkit.layers.gates.squeeze_excitation import SCSE, SpatialExcitation, SqueezeExcitation
    from attnkit.layers.graph.attention import GraphAttention
    from attnkit.layers.graph.han import HANAttention
    from attnkit.layers.graph.hgt import HGTAttention
    from attnkit.layers.graph.rgat import RGATAttention
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
    from attnkit.layers.tokens.nadaraya_watson import NadarayaWatson
    from attnkit.layers.tokens.pooling import AttentionPool
    from attnkit.lightning.export.exported import load
    from attnkit.models.captioning.captioner import Captioner
    from attnkit.models.captioning.generate import generate
    from attnkit.models.captioning.hard_decoder import HardRecurrentDecoder
    from attnkit.models.captioning.image_encoders import CNNEncoder, TimmEncoder, ViTEncoder
    from attnkit.models.captioning.recurrent_decoder import RecurrentDecoder
    from attnkit.models.captioning.transformer_decoder import TransformerDecoder
    from attnkit.models.gat import GAT
    from attnkit.models.graph_transformer import GraphTransformer
    from attnkit.models.polynormer import Polynormer
    from attnkit.models.sgformer import SGFormer
    from attnkit.models.vit import ViT
    from attnkit.surgery.insert import insert_attention, remove_attention
    from attnkit.surgery.replace import replace_attention
