"""Whole models on attnkit's block."""

from attnkit.models.backbones import timm_backbone
from attnkit.models.captioner import Captioner
from attnkit.models.gat import GAT
from attnkit.models.graph_transformer import GraphTransformer
from attnkit.models.hard_decoder import HardRecurrentDecoder
from attnkit.models.image_encoders import CNNEncoder, TimmEncoder, ViTEncoder
from attnkit.models.recurrent_decoder import RecurrentDecoder
from attnkit.models.resnet import ResNet
from attnkit.models.transformer_decoder import TransformerDecoder
from attnkit.models.vit import VIT_SIZES, ViT

__all__ = [
    "GAT",
    "VIT_SIZES",
    "CNNEncoder",
    "Captioner",
    "GraphTransformer",
    "HardRecurrentDecoder",
    "RecurrentDecoder",
    "ResNet",
    "TimmEncoder",
    "TransformerDecoder",
    "ViT",
    "ViTEncoder",
    "timm_backbone",
]
