"""Segmentation networks: a Vision Transformer and the heads that read its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attnkit.core.arguments import at_least
from attnkit.core.masks.base import Mask, register
from attnkit.core.positions.relative import Rotary2d
from attnkit.interop import from_timm
from attnkit.models.vit import Images, ViT
from attnkit.tasks.images.sizes import Size, sides

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


@dataclass(frozen=True, eq=False)
class _RegionOfQuery(Mask):
    """Mask with which a query sees only the patches of its region; other tokens see everything.

    The tokens are the queries, then prefix tokens, then the patches.

    Args:
        regions: True where a patch is in the region of a query.
        num_prefix_tokens: number of tokens between the queries and the patches; queries see them,
            and each other.
    """

    regions: Annotated[Tensor, "batch queries patches", bool]
    num_prefix_tokens: int = 0

    @property
    def leading(self) -> tuple[int, int]:
        return len(self.regions), 1

    def allows(
        self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, num_queries: Any,
        num_keys: Any,
    ) -> Tensor:  # fmt: skip
        count, first = self.regions.shape[1], self.regions.shape[1] + self.num_prefix_tokens
        own = self.regions[batch, query.clamp(max=count - 1), (key - first).clamp(min=0)]
        return own | (query >= count) | (key < first)


class QueryHead(Head):
    """One learned query for each class, which passes the last blocks of the backbone together with
    the patches (Kerssies et al., Your ViT is Secretly an Image Segmentation Model, 2025: EoMT).

        tokens = block([queries, tokens], _RegionOfQuery)     for each of the last blocks
        logits[class] = mlp(query of the class) · upscale(patches)

    In training, a query sees in some of the blocks only the patches that the previous answer
    assigns to its class; the share of these blocks, `masked_share`, falls from 1 at the start to 0
    at the end, so that nothing is masked afterwards. In training the head also returns the answers
    before every block, which get the same loss as the last: [batch, answers, classes, height,
    width].

    The head takes the last blocks and the norm out of the backbone. It differs from the paper:
    there is one query for each class instead of many that are matched with regions, a patch is in
    the region of the class with the highest logit, and the share falls equally in all blocks.
    Rotary positions are applied to patches only, because queries have no position.

    Args:
        backbone: the network whose last blocks are taken.
        num_classes: number of queries.
        num_blocks: number of blocks that the queries pass; fewer than the backbone has.
    """

    def __init__(self, backbone: ViT, num_classes: int, *, num_blocks: int = 2) -> None:
        depth = len(backbone.blocks) - num_blocks
        at_least(1, num_blocks=num_blocks)
        if depth < 1:
            raise ValueError(
                f"num_blocks: expected less than the backbone's {depth + num_blocks} blocks, "
                f"got {num_blocks}"
            )
        super().__init__(backbone, [depth - 1])
        self.blocks, backbone.blocks = backbone.blocks[depth:], backbone.blocks[:depth]
        self.norm, backbone.norm = backbone.norm, nn.Identity()
        dim = backbone.dim
        self.queries = nn.Parameter(torch.randn(num_classes, dim) * 0.02)
        self.rotary: Rotary2d | None = None
        if backbone.rotary is not None:
            first = num_classes + backbone.num_prefix_tokens
            self.rotary = Rotary2d(backbone.head_dim, backbone.grid, num_prefix_tokens=first)
        layers = [nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(dim, dim))
        # up to a quarter of the image's resolution, as in the paper
        steps = max(1, min(self.patch).bit_length() - 3)
        self.upscale = nn.Sequential(*(_Double(dim) for _ in range(steps)))
        self.masked_share = 1.0

    def anneal(self, progress: float) -> None:
        """Set the share of masked blocks for a progress of training from 0 to 1."""
        self.masked_share = (1 - progress) ** 0.9

    def forward(self, features: Features) -> Tensor:
        queries = self.queries.expand(features.shape[0], -1, -1)  # not len: torch.export
        tokens = torch.cat([queries, features[:, -1]], dim=1)
        answers = []
        for block in self.blocks:
            mask = None
            if self.training:
                answers.append(self.answer(tokens))
                if torch.rand(()) < self.masked_share:
                    mask = self._regions(answers[-1])
            tokens = block(tokens, positions=self.rotary, mask=mask)
        last = self.answer(tokens)
        return torch.stack([*answers, last], dim=1) if self.training else last

    def answer(self, tokens: Annotated[Tensor, "batch tokens dim"]) -> Logits:
        """Return the logits of every pixel from the current queries and patches."""
        tokens, count = self.norm(tokens), len(self.queries)
        pixels = self.upscale(self.maps(tokens[:, count:]))
        logits = torch.einsum("bkd,bdhw->bkhw", self.mlp(tokens[:, :count]), pixels)
        return self.enlarged(logits)

    def _regions(self, logits: Logits) -> _RegionOfQuery:
        coarse = functional.interpolate(logits.detach(), self.grid, mode="bilinear")
        classes = torch.arange(len(self.queries), device=logits.device)
        regions = coarse.argmax(dim=1, keepdim=True) == classes[:, None, None]
        return _RegionOfQuery(regions.flatten(2), self.num_prefix_tokens)


class _Double(nn.Sequential):
    """Doubles the resolution of a map, as the paper's ScaleBlock, but with a norm without
    groups."""

    def __init__(self, dim: int) -> None:
        grown = nn.ConvTranspose2d(dim, dim, 2, 2)
        within = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        super().__init__(grown, nn.GELU(), within, nn.GroupNorm(1, dim))


register(_RegionOfQuery)


class Segmenter(nn.Module):
    """Segmentation network that computes the logits of every pixel: `head(features(images))`.

    The features are the tokens after the blocks of the backbone that the head chooses. The
    classifier of the backbone is left out, and a Vision Transformer of timm is converted to
    attnkit's, with equal outputs. Fine-tuning treats everything named `head` as the head.

    Args:
        backbone: constructor of a `ViT` or a network of timm, called with `image_size`,
            `in_channels` and `num_classes=0`, and if it is a `ViT` with `patch_size`.
        decoder: constructor of the head, such as `LinearHead`, called with the backbone and
            `num_classes`.
        image_size: side in pixels, or [height, width].
        in_channels: number of channels of the images.
        num_classes: number of logits of a pixel.
        patch_size: patch side of a `ViT`; None: its default. A network of timm has its own.

    Raises:
        ValueError: the backbone is not a Vision Transformer.
    """

    def __init__(
        self,
        backbone: Callable[..., nn.Module],
        decoder: Callable[..., nn.Module],
        *,
        image_size: Size,
        in_channels: int,
        num_classes: int,
        patch_size: int | None = None,
    ) -> None:
        super().__init__()
        given: dict[str, Any] = {"image_size": sides(image_size), "in_channels": in_channels}
        kind = getattr(backbone, "func", backbone)
        if patch_size is not None and isinstance(kind, type) and issubclass(kind, ViT):
            given["patch_size"] = patch_size
        network = backbone(**given, num_classes=0)
        try:
            found: Any = network if isinstance(network, ViT) else from_timm(network)
        except TypeError as error:
            raise ValueError(
                "backbone: expected a Vision Transformer, such as timm's vit_small_patch16_224 "
                f"(backbone.name), got {type(network).__name__}"
            ) from error
        except ValueError as error:
            raise ValueError(f"backbone: {error}") from error
        found.native = False  # the head takes one image size
        self.backbone: Any = found
        self.head: Any = decoder(found, num_classes=num_classes)

    def forward(self, images: Images) -> Annotated[Tensor, "batch classes height width"]:
        """Return the logits of every pixel. If the head has several answers in training, the result
        has one more dimension after the batch."""
        return self.head(self.features(images))

    def features(self, images: Images) -> Annotated[Tensor, "batch layers tokens dim"]:
        """Return the tokens that the head reads."""
        return torch.stack(self.backbone.layers(images, self.head.layers), dim=1)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters without weight decay."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()} | {"head.queries"}
