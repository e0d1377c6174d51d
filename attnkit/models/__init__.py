"""Whole models on attnkit's block."""

from attnkit.models.gat import GAT
from attnkit.models.graph_transformer import GraphTransformer
from attnkit.models.resnet import ResNet
from attnkit.models.vit import VIT_SIZES, ViT

__all__ = ["GAT", "VIT_SIZES", "GraphTransformer", "ResNet", "ViT"]
