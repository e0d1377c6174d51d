"""A model for `python -m attnkit doctor docs/examples/timm_model.py:build`."""

import timm
import torch


def build():
    return timm.create_model("vit_tiny_patch16_224"), torch.randn(1, 3, 224, 224)
