"""The Vision Transformer, built from attnkit's blocks."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

import torch
from timm.layers import PatchDropoutWithIndices, trunc_normal_
from torch import Tensor, nn

from attnkit.core.arguments import at_least, choice, divides, pair, share
from attnkit.core.multihead import MultiHeadAttention, reset_linear
from attnkit.core.normalizers import Normalizer
from attnkit.core.positions.absolute import (
    BICUBIC,
    FactorizedPositions2d,
    resize_positions,
    sincos_2d,
)
from attnkit.core.positions.relative import Rotary2d, Rotation
from attnkit.core.scores.kinds import Score
from attnkit.core.scores.learned import ScoreName
from attnkit.layers.patch import PackedImages, PatchEmbedding
from attnkit.layers.pooling import AttentionPool
from attnkit.layers.transformer import Activation, TransformerBlock
from attnkit.models.native import encode, pooled, positions_on, rotation_on

Images = Annotated[Tensor, "batch channels height width"]
OwnSizes = Sequence[Annotated[Tensor, "channels height width"]]

PositionKind = Literal["learned", "factorized2d", "sincos2d", "rotary2d"]
LEARNED_POSITIONS = ("learned", "factorized2d")
Pooling = Literal["class", "mean", "attention"]

VIT_SIZES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Touvron et al., Training data-efficient image transformers, 2021, table 1
        "tiny": {"dim": 192, "depth": 12, "num_heads": 3},
        "small": {"dim": 384, "depth": 12, "num_heads": 6},
        # Dosovitskiy et al., An image is worth 16x16 words, 2021, table 1
        "base": {"dim": 768, "depth": 12, "num_heads": 12},
        "large": {"dim": 1024, "depth": 24, "num_heads": 16},
    }
)
"""The published sizes; 5.7, 22, 86 and 304 million parameters at 224 pixels and patch 16."""


class ViT(nn.Module):
    """Vision Transformer (Dosovitskiy et al., An image is worth 16x16 words, 2021).

        tokens = [class, registers, patches · W + positions]
        tokens = block(tokens)    depth times
        logits = head(norm(pool(tokens)))

    Images `[batch, channels, height, width]` in, logits `[batch, num_classes]` out. Images may also
    be a list of `[channels, height, width]` of any sizes that are multiples of the patch, or their
    `PackedImages`: they are computed as one packed batch without padding (Dehghani et al., NaViT,
    2023), and the logits of each image are those of a model of its size (see `resize`).

    With class-token pooling the last block computes the query, output and MLP of that token alone;
    keys and values still come from all tokens. The result is exactly the same, with less work. The
    position of the class token that some implementations add is part of the class token here.

    Args:
        image_size: height and width in pixels, or one number for both.
        patch_size: height and width in pixels, or one number for both; must divide the image.
        in_channels: channels of the images.
        num_classes: number of logits; 0: `forward` returns the features.
        dim, depth, num_heads, mlp_ratio: channels, blocks, heads, and the MLP's width over `dim`.
        positions: "learned"; "factorized2d", learned for rows and columns and added (NaViT);
            "sincos2d", fixed (MoCo v3, MAE); "rotary2d", applied to queries and keys (Heo et al.
            2024); None.
        position_std: deviation of initial learned positions; None: 0.02, as published. Small
            models on small images learn much sooner from positions as large as the patches, about
            0.5. Only "learned" and "factorized2d" have one.
        pooling: "class" token, "mean" over the patches, or "attention", one learned query over
            the patches (Zhai et al. 2022).
        class_token: whether there is one; None: if the pooling reads it.
        num_registers: learned extra tokens (Darcet et al. 2024), not pooled.
        qkv_bias, qk_norm: settings of the attention in the blocks (attention pooling always has a
            bias and has neither this norm nor dropout, as in timm).
        score: score of every attention, pooling included: a name or a `Score` without tensors, as
            in `MultiHeadAttention`.
        normalizer: normalizer of the attention in the blocks: a name or a `Normalizer`, as in
            `MultiHeadAttention`.
        dropout_p: dropout after embedding and attention and in the MLPs.
        drop_path: probability that a sample skips a branch, rising linearly from 0 at the first
            block to this at the last; with one block it is 0.
        patch_dropout: share of patches left out in training (Li et al. 2023), after positions.
        native: whether images in one tensor may have any size too, as in a list; None: no.
        embed_norm: whether a layer norm precedes the first block, and patches have no bias (CLIP).
        norm_after_pooling: whether the norm comes after pooling, or before it; None: after mean
            pooling (as in timm and BEiT), else before.
        layer_scale, attention_dropout_p, activation, norm_eps, backend: as in `TransformerBlock`.

    Raises:
        ValueError: sizes that do not divide, unknown choices, images of another size.
    """

    def __init__(
        self,
        *,
        image_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        positions: PositionKind | None = "learned",
        position_std: float | None = None,
        pooling: Pooling = "class",
        class_token: bool | None = None,
        num_registers: int = 0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        score: ScoreName | Score = "scaled_dot",
        normalizer: Literal["softmax", "linear", "hard"] | Normalizer = "softmax",
        layer_scale: float | None = None,
        dropout_p: float = 0.0,
        attention_dropout_p: float = 0.0,
        drop_path: float = 0.0,
        patch_dropout: float = 0.0,
        native: bool | None = None,
        embed_norm: bool = False,
        norm_after_pooling: bool | None = None,
        activation: Activation = "gelu",
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        choice(get_args(Pooling), pooling=pooling)
        choice((*get_args(PositionKind), None), positions=positions)
        at_least(1, dim=dim, depth=depth, num_heads=num_heads, in_channels=in_channels)
        divides("num_heads", num_heads, dim=dim)
        at_least(0, num_classes=num_classes, num_registers=num_registers)
        share(drop_path=drop_path, patch_dropout=patch_dropout)
        if position_std is not None and positions not in LEARNED_POSITIONS:
            raise ValueError(
                f"position_std: only {' and '.join(map(repr, LEARNED_POSITIONS))} positions have "
                f"one, got {position_std} with {positions!r}"
            )
        if class_token is None:
            class_token = pooling == "class"
        elif pooling == "class" and not class_token:
            raise ValueError("pooling: 'class' reads the class token, but class_token is False")
        if norm_after_pooling is None:
            norm_after_pooling = pooling == "mean"

        self.image_size = pair("image_size", image_size)
        self.native = bool(native)
        self.num_classes = num_classes
        self.dim = dim
        self.head_dim = dim // num_heads
        self.pooling = pooling
        self.positions = positions
        self.resampling = BICUBIC  # how learned positions are resampled
        self.position_std = 0.02 if position_std is None else position_std
        self.num_prefix_tokens = int(class_token) + num_registers

        self.patch_embed = PatchEmbedding(
            pair("patch_size", patch_size), in_channels, dim, bias=not embed_norm
        )
        grid = self.grid
        self.class_token = nn.Parameter(torch.empty(1, 1, dim)) if class_token else None
        self.registers = nn.Parameter(torch.empty(1, num_registers, dim)) if num_registers else None
        self.position_table: Tensor | None
        if positions == "learned":
            self.position_table = nn.Parameter(torch.empty(1, grid[0] * grid[1], dim))
        else:
            size = 1, grid[0] * grid[1], dim
            table = torch.empty(size) if positions == "sincos2d" else None
            self.register_buffer("position_table", table, persistent=False)
        self.factorized_positions: FactorizedPositions2d | None = None
        if positions == "factorized2d":
            self.factorized_positions = FactorizedPositions2d(grid, dim, std=self.position_std)
        self.rotary = self._rotary(grid) if positions == "rotary2d" else None
        self.dropout = nn.Dropout(dropout_p)
        self.patch_dropout = PatchDropoutWithIndices(patch_dropout, num_prefix_tokens=0)
        self.embed_norm = nn.LayerNorm(dim, eps=norm_eps) if embed_norm else nn.Identity()
        self.blocks = nn.ModuleList(
            TransformerBlock(
                dim,
                num_heads,
                mlp_ratio=mlp_ratio,
                qkv_bias=qkv_bias,
                qk_norm=qk_norm,
                score=score,
                normalizer=normalizer,
                layer_scale=layer_scale,
                dropout_p=dropout_p,
                attention_dropout_p=attention_dropout_p,
                drop_path=drop_path * index / max(1, depth - 1),
                activation=activation,
                norm_eps=norm_eps,
                backend=backend,
            )
            for index in range(depth)
        )
        norms = [nn.Identity(), nn.LayerNorm(dim, eps=norm_eps)]
        self.norm, self.pooled_norm = norms if norm_after_pooling else reversed(norms)
        self.pool: nn.Module | None = None
        if pooling == "attention":
            self.pool = AttentionPool(
                dim,
                num_heads,
                mlp_ratio=mlp_ratio,
                score=score,
                activation=activation,
                norm_eps=norm_eps,
                backend=backend,
            )
        self.head = nn.Linear(dim, num_classes) if num_classes else nn.Identity()
        self.reset_parameters()

    @classmethod
    def from_size(cls, size: str, **options: Any) -> "ViT":
        """Create a published size, "tiny", "small", "base" or "large" (`VIT_SIZES`)."""
        choice(VIT_SIZES, size=size)
        return cls(**{**VIT_SIZES[size], **options})

    def reset_parameters(self) -> None:
        """Initialize matrices Xavier-uniform and biases zero, as the paper's code does; patches are
        initialized as convolutions."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                reset_linear(module)
        for module in self.modules():
            if isinstance(module, MultiHeadAttention):
                module.reset_parameters()  # fused projections one by one
        if isinstance(self.position_table, nn.Parameter):
            trunc_normal_(self.position_table, std=self.position_std)
        elif self.position_table is not None:
            with torch.device("cpu"):
                table = sincos_2d(self.grid, self.dim)
            self.position_table.copy_(table[None])
        if self.factorized_positions is not None:
            self.factorized_positions.reset_parameters()
        for token in (self.class_token, self.registers):
            if token is not None:
                nn.init.normal_(token, std=1e-6)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches of an image of `image_size`."""
        return self._grid(self.image_size, self.patch_embed.patch_size)

    def forward(
        self, images: Images | OwnSizes | PackedImages
    ) -> Annotated[Tensor, "batch classes"]:
        """Return the logits."""
        return self.head(self.features(images))

    def features(self, images: Images | OwnSizes | PackedImages) -> Annotated[Tensor, "batch dim"]:
        """Return the input of the head: the pooled, normalized vector."""
        images = self._together(images)
        if not isinstance(images, Tensor):
            found, lengths = encode(self, images, only_class_token=self.pooling == "class")
            return self.pooled_norm(pooled(self, self.norm(found), lengths))
        tokens = self._encode(images, only_class_token=self.pooling == "class")
        tokens = self.norm(tokens)
        if self.pooling == "class":
            return self.pooled_norm(tokens[:, 0])
        patches = tokens[:, self.num_prefix_tokens :]
        return self.pooled_norm(patches.mean(dim=1) if self.pool is None else self.pool(patches))

    def tokens(
        self, images: Images | OwnSizes | PackedImages
    ) -> Annotated[Tensor, "batch tokens dim"] | list[Annotated[Tensor, "tokens dim"]]:
        """Return all tokens, prefix and patches, after the last block and norm; for a list of
        images or `PackedImages`, a list with the tokens of each.

        With `norm_after_pooling` they are not normalized.
        The first `num_prefix_tokens` are the class token and the registers, in this order.
        """
        if not isinstance(images, Tensor):
            found, lengths = encode(self, images, only_class_token=False)
            return list(self.norm(found).split(lengths))
        return self.norm(self._encode(images, only_class_token=False))

    def layers(
        self, images: Images, numbers: Sequence[int]
    ) -> list[Annotated[Tensor, "batch tokens dim"]]:
        """Return all tokens, as `tokens` does, after the blocks with these numbers, in their order.

        The first block is 0. Each result is normalized by the norm after the last block.

        Raises:
            TypeError: images are not a tensor.
            ValueError: a number without a block, or no numbers.
        """
        if not isinstance(images, Tensor):
            raise TypeError(
                "images: expected one tensor [batch, channels, height, width], "
                f"got {type(images).__name__}; tokens() takes a list"
            )
        depth = len(self.blocks)
        if not numbers or not all(0 <= number < depth for number in numbers):
            raise ValueError(f"numbers: expected blocks from 0 to {depth - 1}, got {[*numbers]}")
        self._check_size(images)
        tokens, rotation = self._embed(images)
        found = {}
        for number, block in enumerate(self.blocks[: max(numbers) + 1]):
            tokens = block(tokens, positions=rotation)
            if number in numbers:
                found[number] = self.norm(tokens)
        return [found[number] for number in numbers]

    def resize(
        self,
        image_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> "ViT":
        """Change the image and patch size that the model takes, in place, and return self.

        Learned positions are resampled (bicubic, antialiased), patch weights by FlexiViT's
        pseudo-inverse resize (Beyer et al. 2023); fixed and rotary positions are computed anew. The
        parameters are new ones, so create the optimizer after resizing.
        """
        old_grid = self.grid
        image = self.image_size if image_size is None else pair("image_size", image_size)
        patch = self.patch_embed.patch_size
        patch = patch if patch_size is None else pair("patch_size", patch_size)
        grid = self._grid(image, patch)
        self.image_size = image
        self.patch_embed.resize(patch)
        table = self.position_table
        if isinstance(table, nn.Parameter):
            resized = resize_positions(table.detach(), old_grid, grid, self.resampling)
            self.position_table = nn.Parameter(resized, requires_grad=table.requires_grad)
        elif table is not None:
            self.position_table = sincos_2d(grid, self.dim)[None].to(table)
        elif self.factorized_positions is not None:
            self.factorized_positions.resize(grid, self.resampling)
        elif self.rotary is not None:
            self.rotary = self._rotary(grid).to(self.rotary.cos)
        return self

    def no_weight_decay(self) -> set[str]:
        """Names of parameters an optimiser should not shrink: tokens and positions."""
        names = {"class_token", "registers", "position_table", "pool.query"}
        names |= {"factorized_positions.row_table", "factorized_positions.column_table"}
        return names & {name for name, _ in self.named_parameters()}

    def _check_size(self, images: Tensor) -> None:
        if tuple(images.shape[-2:]) != self.image_size and not self.native:
            raise ValueError(
                f"images: expected {self.image_size[0]} x {self.image_size[1]} pixels, "
                f"got {list(images.shape)}; resize() makes the model take another size"
            )

    def _encode(self, images: Tensor, *, only_class_token: bool) -> Tensor:
        self._check_size(images)
        tokens, rotation = self._embed(images)
        *blocks, last = self.blocks
        for block in blocks:
            tokens = block(tokens, positions=rotation)
        if not only_class_token:
            return last(tokens, positions=rotation)
        if rotation is not None:
            rotation = rotation.first_queries(1)
        return last(tokens, query_tokens=1, positions=rotation)

    def _together(self, images: Any) -> Any:
        """Stack images of equal sizes into one tensor, which needs no mask; return others as is."""
        is_list = isinstance(images, list | tuple) and len(images) > 0
        if not is_list or any(image.shape != images[0].shape for image in images):
            return images
        takes = self.native or tuple(images[0].shape[-2:]) == self.image_size
        return torch.stack(list(images)) if takes else images

    def _embed(self, images: Tensor) -> tuple[Tensor, Rotation | None]:
        tokens = self.patch_embed(images)
        own = tuple(images.shape[-2:]) == self.image_size
        height, width = images.shape[-2:]
        grid = self._grid((height, width), self.patch_embed.patch_size)
        if not own:
            added = positions_on(self, grid)
            tokens = tokens if added is None else tokens + added
        elif self.position_table is not None:
            tokens = tokens + self.position_table
        elif self.factorized_positions is not None:
            tokens = self.factorized_positions(tokens)
        tokens, kept = self.patch_dropout(tokens)  # kept is None if no patch was dropped
        prefix = [
            token.expand(images.shape[0], -1, -1)
            for token in (self.class_token, self.registers)
            if token is not None
        ]
        if prefix:
            tokens = torch.cat([*prefix, tokens], dim=1)
        if own:
            rotation = None if self.rotary is None else self.rotary.rotation(kept)
        else:
            rotation = rotation_on(self, grid, kept)
        return self.embed_norm(self.dropout(tokens)), rotation

    def _rotary(self, grid: tuple[int, int]) -> Rotary2d:
        return Rotary2d(self.head_dim, grid, num_prefix_tokens=self.num_prefix_tokens)

    @staticmethod
    def _grid(image: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
        if image[0] % patch[0] or image[1] % patch[1]:
            raise ValueError(
                f"patch_size: {patch[0]} x {patch[1]} does not divide "
                f"image_size {image[0]} x {image[1]}"
            )
        return image[0] // patch[0], image[1] // patch[1]
