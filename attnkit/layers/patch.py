"""An image cut into patches, each embedded linearly."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from timm.layers import resample_patch_embed
from torch import Tensor, nn

Grid = tuple[int, int]


def cut_patches(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Cut images `[batch, channels, height, width]` into patches in reading order,
    `[batch, patches, channels · patch height · patch width]`.

    Raises:
        ValueError: a side of the images is 0 or no multiple of the patch's side.
    """
    batch, channels, height, width = images.shape
    if height % patch_size[0] or width % patch_size[1] or not height or not width:
        raise ValueError(
            f"images: expected a multiple of patch_size {patch_size[0]} x {patch_size[1]}, "
            f"got {height} x {width}"
        )
    rows, columns = height // patch_size[0], width // patch_size[1]
    patches = images.reshape(batch, channels, rows, patch_size[0], columns, patch_size[1])
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)


def embed_patches(patches: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return tokens `[…, dim]` of cut patches `[…, pixels]`, with the parameters of a
    `PatchEmbedding`.

    Raises:
        TypeError: patches are not floating point.
        ValueError: patches of another size or number of channels.
    """
    if not patches.is_floating_point():
        raise TypeError(f"images: expected a floating-point tensor, got {patches.dtype}")
    if patches.shape[-1] != weight[0].numel():
        raise ValueError(
            f"images: expected {weight.shape[1]} channels in patches of {weight.shape[2]} x "
            f"{weight.shape[3]}, which are {weight[0].numel()} numbers, got {patches.shape[-1]}"
        )
    return F.linear(patches, weight.flatten(1), bias)


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
        return embed_patches(cut_patches(images, self.patch_size), self.weight, self.bias)

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


@dataclass(frozen=True)
class PackedImages:
    """The patches of several images, one image after the other, as `ViT` takes them.

    Attributes:
        patches: the pixels of each patch, in the order of `PatchEmbedding`'s weight.
        grids: rows and columns of patches of each image; their products sum to the patches.

    Raises:
        ValueError: no image, a grid without patches, or another number of patches.
    """

    patches: Annotated[Tensor, "patches pixels"]
    grids: Sequence[Grid]

    def __post_init__(self) -> None:
        if not self.grids:
            raise ValueError("images: expected at least one image, got an empty batch")
        total = sum(rows * columns for rows, columns in self.grids)
        if min(map(min, self.grids)) < 1 or total != len(self.patches):
            raise ValueError(
                f"grids: expected {len(self.patches)} patches in total, at least one in each grid, "
                f"got {total} patches"
            )

    def __len__(self) -> int:
        return len(self.grids)

    @classmethod
    def of(
        cls, images: Sequence[Annotated[Tensor, "channels height width"]], patch_size: Grid
    ) -> "PackedImages":
        """Cut and pack images `[channels, height, width]` whose sides are multiples of the patch.

        Raises:
            ValueError: an empty batch, an image of another shape, or of another dtype or number of
                channels than the first; the message has the image's index.
        """
        parts, grids = [], []
        for number, image in enumerate(images):
            if image.ndim != 3:
                raise ValueError(
                    f"images[{number}]: expected [channels, height, width], got {list(image.shape)}"
                )
            kind, expected = ((len(one), one.dtype) for one in (image, images[0]))
            if kind != expected:
                raise ValueError(
                    f"images[{number}]: expected {expected[0]} channels of {expected[1]}, as "
                    f"images[0], got {kind[0]} of {kind[1]}"
                )
            try:
                patches = cut_patches(image[None], patch_size)[0]
            except ValueError as error:
                raise ValueError(f"images[{number}]: {error}") from error
            parts.append(patches)
            grids.append((image.shape[-2] // patch_size[0], image.shape[-1] // patch_size[1]))
        return cls(torch.cat(parts) if parts else torch.empty(0, 1), grids)
