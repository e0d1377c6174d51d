"""Complete models built from attnkit's attention blocks."""

from typing import TYPE_CHECKING

from attnkit.core.names import lazy

if TYPE_CHECKING:
    from attnkit.layers.patch import PackedImages
    from attnkit.models.backbones import timm_backbone
    from attnkit.models.captioning.captioner import Captioner
    from attnkit.models.captioning.image_encoders import CNNEncoder, TimmEncoder, ViTEncoder
    from attnkit.models.captioning.recurrent_decoder import HardRecurrentDecoder, RecurrentDecoder
    from attnkit.models.captioning.transformer_decoder import TransformerDecoder
    from attnkit.models.gat import GAT
    from attnkit.models.graph_transformer import GraphTransformer
    from attnkit.models.polynormer import Polynormer
    from attnkit.models.resnet import ResNet
    from attnkit.models.sgformer import SGFormer
    from attnkit.models.vit import VIT_SIZES, ViT
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "GAT",
    "VIT_SIZES",
    "CNNEncoder",
    "Captioner",
    "GraphTransformer",
    "HardRecurrentDecoder",
    "PackedImages",
    "Polynormer",
    "RecurrentDecoder",
    "ResNet",
    "SGFormer",
    "TimmEncoder",
    "TransformerDecoder",
    "ViT",
    "ViTEncoder",
    "timm_backbone",
]
