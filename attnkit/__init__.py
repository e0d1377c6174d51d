"""attnkit: vision and graph attention for PyTorch Lightning, on one block with every kernel.

This file is the public table and nothing else. Names are imported when first used, so that
`import attnkit` and the command line's help do not wait for torch.
"""

from typing import TYPE_CHECKING

from attnkit.core.names import lazy

__version__ = "0.3.0"

if TYPE_CHECKING:
    from attnkit import checks, finetune, interop, interpret, lightning, metrics
    from attnkit.checks.doctor import doctor
    from attnkit.checks.run import assert_attention, check_attention
    from attnkit.core import masks, normalizers, positions, scores
    from attnkit.core.attend import attend
    from attnkit.core.cache import KeyValueCache
    from attnkit.core.capture.logits import record_logits
    from attnkit.core.capture.watch import capture_attention
    from attnkit.core.kernels.choose import UnsupportedError, explain_backends
    from attnkit.core.kernels.edges.edges import edge_weights
    from attnkit.core.kernels.hard import record_draws
    from attnkit.core.kernels.linear import delta_rule
    from attnkit.core.kernels.record import record_backends
    from attnkit.core.masks.base import Dense
    from attnkit.core.masks.edges import EdgeFeatures, Edges
    from attnkit.core.masks.grids import Blocks, Window2d
    from attnkit.core.masks.sequences import Causal, Packed, Padding, Window
    from attnkit.core.multihead import MultiHeadAttention
    from attnkit.core.normalizers import DeltaRule, Hard, Linear, Softmax
    from attnkit.core.operators.multiply_adds import count_multiply_adds
    from attnkit.core.operators.precision import exact
    from attnkit.core.positions.absolute import (
        FactorizedPositions2d,
        LearnedPositions1d,
        LearnedPositions2d,
        sincos_1d,
        sincos_2d,
    )
    from attnkit.core.positions.relative import (
        ALiBi,
        RelativeBias1d,
        RelativeBias2d,
        Rotary1d,
        Rotary2d,
    )
    from attnkit.core.scores import learned as learned_scores
    from attnkit.core.scores.additive import Additive
    from attnkit.core.scores.kinds import Cosine, Gaussian, General, ScaledDot
    from attnkit.core.weights import attention_weights
    from attnkit.interpret.diagnosis import diagnose_attention
    from attnkit.interpret.explain import explain
    from attnkit.interpret.explanation import Explanation
    from attnkit.interpret.training import Interpret
    from attnkit.interpret.trust.curves import perturbation_curves
    from attnkit.interpret.trust.edges import edge_fidelity
    from attnkit.interpret.trust.judge import trust
    from attnkit.interpret.trust.result import Trust
    from attnkit.launch.api import run, sweep
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
    from attnkit.layers.graph.rgat import RGATAttention
    from attnkit.layers.graph.typed_attention import HANAttention, HGTAttention
    from attnkit.layers.graph.typed_edges import TypedEdges
    from attnkit.layers.maps import Combined, GatedSum
    from attnkit.layers.nadaraya_watson import NadarayaWatson
    from attnkit.layers.pooling import AttentionPool
    from attnkit.layers.spatial import ContextAttention, SpatialAttention
    from attnkit.lightning.exported import load
    from attnkit.models.captioning.captioner import Captioner
    from attnkit.models.captioning.generate import generate
    from attnkit.models.captioning.image_encoders import CNNEncoder, TimmEncoder, ViTEncoder
    from attnkit.models.captioning.recurrent_decoder import HardRecurrentDecoder, RecurrentDecoder
    from attnkit.models.captioning.transformer_decoder import TransformerDecoder
    from attnkit.models.gat import GAT
    from attnkit.models.graph_transformer import GraphTransformer
    from attnkit.models.polynormer import Polynormer
    from attnkit.models.sgformer import SGFormer
    from attnkit.models.vit import ViT
    from attnkit.surgery.insert import insert_attention, remove_attention
    from attnkit.surgery.replace import replace_attention
else:
    __getattr__, __dir__ = lazy(__name__)
