"""Models whose maps are known."""

import pytest
import torch
from torch import nn

import attnkit


class LinearModel(nn.Module):
    """Logits are sums over pixels: what a patch adds is known."""

    patch_size = (2, 3)

    def __init__(self, classes=5, channels=2, size=(6, 15)):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, channels, *size, dtype=torch.float64))

    def forward(self, images):
        return torch.einsum("bchw,kchw->bk", images.to(self.weight), self.weight)

    def contributions(self, images, target):
        """[batch, 3, 5]: what the logit has of each patch, beyond the mean colour there."""
        change = images - images.mean(dim=(0, 2, 3), keepdim=True)
        pixels = (change * self.weight[target]).sum(dim=1)
        return pixels.unflatten(2, (5, 3)).unflatten(1, (3, 2)).sum(dim=(2, 4)).detach()


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return LinearModel()


@pytest.fixture
def images():
    torch.manual_seed(1)
    return torch.randn(7, 2, 6, 15, dtype=torch.float64)


@pytest.fixture(name="make_vit")
def _make_vit():
    """A ViT of 3 x 5 patches with random weights, norms and positions."""

    def make_vit(**options):
        options = {"dim": 24, "depth": 2, "num_classes": 5, "num_registers": 2} | options
        vit = attnkit.ViT(image_size=(6, 15), patch_size=(2, 3), in_channels=2, **options)
        for parameter in vit.parameters():
            nn.init.normal_(parameter, std=0.4)
        return vit.double()

    return make_vit


@pytest.fixture
def vit(make_vit):
    torch.manual_seed(2)
    return make_vit()
