"""Segmentation heads, which map the tokens of a Vision Transformer to logits of pixels."""

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor, nn
from torch.nn import functional

from attnkit.core.arguments import at_least
from attnkit.models.vit import ViT

Features = Annotated[Tensor, "batch layers tokens dim"]
Logits = Annotated[Tensor, "batch classes height width"]


class Head(nn.Module):
    """Base of the heads: the layers that a head reads, and how tokens become maps.

    Attributes:
        layers: indices of the backbone's blocks whose tokens the head reads, from 0.
        size: (height, width) of the images in pixels.
        grid: (height, width) in patches.
    """

    def __init__(self, backbone: ViT, layers: Sequence[int]) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.size = backbone.image_size
        patch = backbone.patch_embed.patch_size
        self.grid = self.size[0] // patch[0], self.size[1] // patch[1]
        self.patch = patch
        self.num_prefix_tokens = backbone.num_prefix_tokens

    def maps(
        self, tokens: Annotated[Tensor, "*batch tokens dim"]
    ) -> Annotated[Tensor, "*batch dim rows columns"]:
        """Arrange the patch tokens at their places in the image."""
        return tokens[..., self.num_prefix_tokens :, :].mT.unflatten(-1, self.grid)

    def enlarged(self, logits: Logits) -> Logits:
        """Interpolate logits bilinearly to every pixel."""
        if logits.shape[-2:] == self.size:
            return logits
        return functional.interpolate(logits, self.size, mode="bilinear", align_corners=False)


class LinearHead(Head):
    """One linear layer from each token of the last block to logits.

        logits[class, patch] = W token + b

    With `per_pixel` a token is mapped to the logits of all pixels of its patch, so that edges are
    as fine as pixels; otherwise to one logit per class, which is enlarged bilinearly (Strudel et
    al., Segmenter, 2021, "linear decoder").

    Args:
        backbone: the network whose tokens are read.
        num_classes: number of logits of a pixel.
        per_pixel: whether every pixel of a patch has its own weights.
    """

    def __init__(self, backbone: ViT, num_classes: int, *, per_pixel: bool = False) -> None:
        super().__init__(backbone, [len(backbone.blocks) - 1])
        self.pixels = self.patch if per_pixel else (1, 1)
        self.classify = nn.Linear(backbone.dim, num_classes * self.pixels[0] * self.pixels[1])

    def forward(self, features: Features) -> Logits:
        logits = self.maps(self.classify(features[:, -1]))
        batch, _, rows, columns = logits.shape
        high, wide = self.pixels
        logits = logits.view(batch, -1, high, wide, rows, columns).permute(0, 1, 4, 2, 5, 3)
        return self.enlarged(logits.reshape(batch, -1, rows * high, columns * wide))


class ConvolutionalHead(Head):
    """Maps of four blocks at four resolutions, fused from the coarsest to the finest by
    convolutions: a small DPT (Ranftl et al., Vision Transformers for Dense Prediction, 2021).

        m_i = resample_i(tokens after block i)               × 4, × 2, × 1, × 1/2 of the grid
        x = fuse_3(m_3);  x = fuse_i(m_i + enlarged(x))      for i = 2, 1, 0
        logits = enlarged(conv(x))

    The blocks are at 1/4, 2/4, 3/4 and the end of the depth. Unlike in the paper, each fusion is
    one residual block, and the class token is not read.

    Args:
        backbone: the network whose tokens are read; it has at least 4 blocks.
        num_classes: number of logits of a pixel.
        dim: number of channels of the maps.
    """

    def __init__(self, backbone: ViT, num_classes: int, *, dim: int = 64) -> None:
        depth = len(backbone.blocks)
        at_least(1, dim=dim)
        if depth < 4:
            raise ValueError(f"backbone: expected 4 blocks or more to read from, got {depth}")
        super().__init__(backbone, [depth * n // 4 - 1 for n in (1, 2, 3, 4)])
        self.resample = nn.ModuleList(
            (
                nn.ConvTranspose2d(backbone.dim, dim, 4, 4),
                nn.ConvTranspose2d(backbone.dim, dim, 2, 2),
                nn.Conv2d(backbone.dim, dim, 1),
                nn.Conv2d(backbone.dim, dim, 3, 2, 1),
            )
        )
        self.fuse = nn.ModuleList(_Residual(dim) for _ in self.resample)
        self.classify = nn.Conv2d(dim, num_classes, 1)

    def forward(self, features: Features) -> Logits:
        maps = [resample(self.maps(features[:, n])) for n, resample in enumerate(self.resample)]
        fused = self.fuse[-1](maps[-1])
        for fuse, finer in zip(reversed(self.fuse[:-1]), reversed(maps[:-1]), strict=True):
            coarse = functional.interpolate(fused, finer.shape[-2:], mode="bilinear")
            fused = fuse(finer + coarse)
        return self.enlarged(self.classify(fused))


class _Residual(nn.Sequential):
    """A residual block, x + conv(relu(norm(conv(relu(x)))))."""

    def __init__(self, dim: int) -> None:
        first, second = (nn.Conv2d(dim, dim, 3, padding=1) for _ in range(2))
        super().__init__(nn.ReLU(), first, nn.GroupNorm(1, dim), nn.ReLU(), second)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)
