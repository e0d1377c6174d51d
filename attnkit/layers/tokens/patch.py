"""An image cut into patches, each embedded linearly."""

import math

import torch
import torch.nn.functional as F
from timm.layers import resample_patch_embed
from torch import Tensor, nn


class PatchEmbedding(nn.Module):
    """Linear embedding of non-overlapping patches.

    `tokens[b, i] = weight · patch_i + bias`, the patches in reading order. Images
    `[batch, channels, height, width]` of any size that is a multiple of `patch_size` in,
    tokens `[batch, patches, dim]` out.

    The weight has a convolution's shape `[dim, channels, patch height, patch width]`, and the
    result is that of the strided convolution of the ViT (Dosovitskiy et al. 2021), but computed as
    one matrix product on unfolded patches, which is faster on CPUs.

    Raises:
        ValueError: images have another number of dimensions or channels, or are not divisible by
            the patch.
        TypeError: images are not floating point.
    """

    def __init__(
        self, patch_size: tuple[int, int], in_channels: int, dim: int, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.in_channels = in_channels
        self.dim = dim
        self.weight = nn.Parameter(torch.empty(dim, in_channels, *patch_size))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ±1/√(inputs), the rule of nn.Linear and nn.Conv2d."""
        bound = 1 / math.sqrt(self.weight[0].numel())
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, images: Tensor) -> Tensor:
        if images.ndim != 4 or images.shape[1] != self.in_channels:
            raise ValueError(
                f"images: expected [batch, {self.in_channels}, height, width], "
                f"got {list(images.shape)}"
            )
        if not images.is_floating_point():
            raise TypeError(f"images: expected a floating-point tensor, got {images.dtype}")
        batch, channels, height, width = images.shape
        patch_height, patch_width = self.patch_size
        if height % patch_height or width % patch_width:
            raise ValueError(
                f"images: expected a multiple of patch_size {patch_height} x {patch_width}, "
                f"got {height} x {width}"
            )
        rows, columns = height // patch_height, width // patch_width
        patches = images.reshape(batch, channels, rows, patch_height, columns, patch_width)
        patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)
        return F.linear(patches, self.weight.flatten(1), self.bias)

    def resize(self, patch_size: tuple[int, int]) -> "PatchEmbedding":
        """Change the patch size in place; returns self.

        The weights become the pseudo-inverse resize of FlexiViT (Beyer et al. 2023), so that
        enlarging image and patch together leaves the tokens nearly as they were.
        """
        if patch_size != self.patch_size:
            resized = resample_patch_embed(self.weight.detach(), list(patch_size))
            self.weight = nn.Parameter(resized, requires_grad=self.weight.requires_grad)
            self.patch_size = patch_size
        return self

    def extra_repr(self) -> str:
        return f"patch_size={self.patch_size}, in_channels={self.in_channels}, dim={self.dim}"
