"""Encoders of images into memories whose positions form a grid over the image."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from attnkit.core.arguments import at_least, pair
from attnkit.core.positions.absolute import sincos_2d
from attnkit.core.running import evaluating
from attnkit.core.scores.learned import ScoreName
from attnkit.models.backbones import timm_backbone
from attnkit.models.vit import Images, OwnSizes, PositionKind, ViT


class ImageEncoder(nn.Module):
    """Base class of the encoders: images [batch, in_channels, height, width] of one size in, a
    memory [batch, height · width of the grid, dim] out, in row-major order.

    Attributes:
        image_size: (height, width) in pixels.
        grid: (height, width) in positions; the subclass sets it.
        dim: channels of the memory; the subclass sets it.
    """

    grid: tuple[int, int]
    dim: int

    def __init__(self, image_size: int | Sequence[int]) -> None:
        super().__init__()
        self.image_size = pair("image_size", image_size)

    def grid_of(self, images: Images) -> tuple[int, int]:
        """Return the grid of images of one size; here only `image_size` is possible."""
        return self.grid

    def check(self, images: Images) -> None:
        """Raise ValueError for images of another size and TypeError for a list of images."""
        if not isinstance(images, Tensor):
            raise TypeError(
                f"images: {type(self).__name__} takes one tensor [batch, channels, height, width], "
                f"got {type(images).__name__}; ViTEncoder takes a list of images of their own sizes"
            )
        if tuple(images.shape[-2:]) != self.image_size:
            raise ValueError(
                f"images: expected {self.image_size[0]} x {self.image_size[1]} pixels, "
                f"got {list(images.shape)}"
            )


class CNNEncoder(ImageEncoder):
    """A small convolutional network, for images of a few dozen pixels.

        y = relu(norm(conv(y)))    for every number in `stages`; between stages max_pool(y)
        memory = norm(W y) + position_scale · positions

    Four stages turn 48 pixels into 6 × 6 positions. Convolutions are 3 × 3 and followed by pooling,
    as in VGG (Simonyan and Zisserman 2015) with batch norms: a stem of stride 2 would blur objects
    of ten pixels. Positions are sinusoidal in 2-D, added last and large; otherwise the decoder
    learns what is in the image long before it learns where.

    Args:
        image_size, in_channels: size and channels of the images.
        dim: channels of the memory, a multiple of 4.
        stages: channels of every convolution, stage by stage; each stage after the first has half
            the resolution of the one before.
        position_scale: factor of the positions, whose root mean square is 1 / √2 without it.

    Raises:
        ValueError: sizes that are not positive or not a multiple of 4, or more stages than the
            image can be halved.
    """

    positions: Tensor

    def __init__(
        self,
        image_size: int | Sequence[int],
        in_channels: int = 3,
        *,
        dim: int = 128,
        stages: Sequence[Sequence[int]] = ((16,), (32,), (64, 64), (96,)),
        position_scale: float = 2.5,
    ) -> None:
        super().__init__(image_size)
        at_least(1, in_channels=in_channels)
        if not stages or not all(stages) or min(map(min, stages)) < 1:
            raise ValueError(
                f"stages: expected positive channels of each stage's convolutions, got {stages}"
            )
        height, width = (side // 2 ** (len(stages) - 1) for side in self.image_size)
        if min(height, width) < 1:
            raise ValueError(
                f"stages: {len(stages)} stages are too many for {self.image_size[0]} x "
                f"{self.image_size[1]} pixels"
            )
        self.grid = (height, width)
        self.dim = dim
        layers: list[nn.Module] = []
        channels = in_channels
        for number, stage in enumerate(stages):
            if number:
                layers.append(nn.MaxPool2d(2))
            for wider in stage:
                layers.append(Conv2dNormActivation(channels, wider))
                channels = wider
        self.network = nn.Sequential(*layers)
        for module in self.network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.proj = nn.Linear(channels, dim)
        self.norm = nn.LayerNorm(dim)
        self.position_scale = position_scale
        self.register_buffer("positions", torch.empty(height * width, dim), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the positions, which are not learned."""
        with torch.device("cpu"):
            table = sincos_2d(self.grid, self.dim)
        self.positions.copy_(self.position_scale * table)

    def forward(self, images: Images) -> Annotated[Tensor, "batch positions dim"]:
        self.check(images)
        # channels last takes a third less time on a CPU
        maps = self.network(images.contiguous(memory_format=torch.channels_last))
        return self.norm(self.proj(maps.flatten(2).transpose(1, 2))) + self.positions


class ViTEncoder(ImageEncoder):
    """The patch tokens of attnkit's `ViT` after its last block and norm.

    For a list of images [in_channels, height, width], each of its own size, the memory is a list of
    [positions, dim]; the patches of an image attend only to each other.

    Args:
        image_size, in_channels: size and channels of the images.
        patch_size: side of a patch in pixels; None: 8.
        dim, depth, num_heads, mlp_ratio, score, dropout_p, drop_path, native: as in `ViT`.
    """

    def __init__(
        self,
        image_size: int | tuple[int, int],
        in_channels: int = 3,
        *,
        patch_size: int | tuple[int, int] | None = None,
        dim: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        positions: PositionKind | None = "learned",
        position_std: float | None = None,
        num_registers: int = 0,
        score: ScoreName = "scaled_dot",
        dropout_p: float = 0.0,
        drop_path: float = 0.0,
        native: bool | None = None,
    ) -> None:
        super().__init__(image_size)
        self.vit = ViT(
            image_size=self.image_size,
            patch_size=8 if patch_size is None else patch_size,
            in_channels=in_channels,
            num_classes=0,
            dim=dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            positions=positions,
            position_std=position_std,
            pooling="mean",
            norm_after_pooling=False,
            num_registers=num_registers,
            score=score,
            dropout_p=dropout_p,
            drop_path=drop_path,
            native=native,
        )
        self.grid = self.vit.grid
        self.dim = dim

    def grid_of(self, images: Images) -> tuple[int, int]:
        height, width = self.vit.patch_embed.patch_size
        return images.shape[-2] // height, images.shape[-1] // width

    def forward(
        self, images: Images | OwnSizes
    ) -> Annotated[Tensor, "batch positions dim"] | list[Annotated[Tensor, "positions dim"]]:
        tokens, first = self.vit.tokens(images), self.vit.num_prefix_tokens
        if isinstance(tokens, list):
            return [of_image[first:] for of_image in tokens]
        return tokens[:, first:]

    def no_weight_decay(self) -> set[str]:
        """Names of parameters an optimiser should not shrink."""
        return {f"vit.{name}" for name in self.vit.no_weight_decay()}


class TimmEncoder(ImageEncoder):
    """Any network of timm: its last feature map or its patch tokens, projected to `dim`.

    Class and register tokens are left out, so that every position is a place in the image.

    Args:
        name: a name of `timm.list_models()`: "resnet18", "vit_small_patch16_224", …
        image_size, in_channels: size and channels of the images; a Transformer's positions are
            resampled to this size.
        dim: channels of the memory; None: those of the network, without a projection.
        pretrained: whether to load timm's weights, which timm downloads or finds in its cache.
        weights: other weights, as in `timm_backbone`.
        frozen: whether the network stays as it is: it has no gradients and is always in evaluation
            mode, which keeps its batch norms. The projection is trained.
    Raises:
        ValueError: an unknown name, weights that cannot be loaded, or features that do not form a
            grid.
    """

    def __init__(
        self,
        name: str,
        image_size: int | Sequence[int],
        in_channels: int = 3,
        *,
        dim: int | None = None,
        pretrained: bool = False,
        weights: str | Path | None = None,
        frozen: bool = False,
    ) -> None:
        super().__init__(image_size)
        network: Any = timm_backbone(name, in_channels, 0, pretrained=pretrained, weights=weights)
        if hasattr(network, "set_input_size"):
            network.set_input_size(img_size=self.image_size)
        self.network: Any = network
        self.frozen = frozen
        if frozen:
            self.network.requires_grad_(False).eval()
        with evaluating(self.network), torch.no_grad():
            maps = self._maps(torch.zeros(1, in_channels, *self.image_size))
        self.grid = (maps.shape[2], maps.shape[3])
        self.dim = maps.shape[1] if dim is None else dim
        self.proj = nn.Identity() if dim is None else nn.Linear(maps.shape[1], dim)

    def forward(self, images: Images) -> Annotated[Tensor, "batch positions dim"]:
        self.check(images)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            maps = self._maps(images)
        return self.proj(maps.flatten(2).transpose(1, 2))

    def train(self, mode: bool = True) -> "TimmEncoder":
        super().train(mode)
        if self.frozen:
            self.network.eval()
        return self

    def _maps(self, images: Tensor) -> Tensor:
        """Return the features as maps [batch, channels, rows, columns]."""
        features = self.network.forward_features(images)
        if features.ndim == 4:
            is_last = getattr(self.network, "output_fmt", "NCHW") == "NHWC"
            return features.permute(0, 3, 1, 2) if is_last else features
        tokens = features[:, getattr(self.network, "num_prefix_tokens", 0) :]
        embed = getattr(self.network, "patch_embed", getattr(self.network, "stem", None))
        grid = getattr(embed, "grid_size", None)
        if features.ndim != 3 or grid is None or grid[0] * grid[1] != tokens.shape[1]:
            raise ValueError(
                f"name: the features of this network, {list(features.shape)}, do not form a grid"
            )
        return tokens.transpose(1, 2).unflatten(2, tuple(grid))
