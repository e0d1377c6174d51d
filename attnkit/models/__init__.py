"""Whole models on attnkit's block."""

from attnkit.models.vit import VIT_SIZES, ViT

__all__ = ["VIT_SIZES", "ViT"]
