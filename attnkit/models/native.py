"""Batches of images of different sizes for a `ViT`, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from attnkit.core.masks.sequences import Packed
from attnkit.core.positions.absolute import resize_positions, sincos_2d
from attnkit.core.positions.relative import Rotary2d, Rotation
from attnkit.layers.patch import Grid, PackedImages, embed_patches

if TYPE_CHECKING:
    from attnkit.models.vit import ViT

_KEPT = 1024  # cached tables of fixed positions, one for each grid


def encode(
    vit: ViT, images: Sequence[Tensor] | PackedImages, *, only_class_token: bool
) -> tuple[Annotated[Tensor, "tokens dim"], list[int]]:
    """Return the tokens of all images after the last block, and the number of tokens of each image.

    The tokens of an image are its prefix and its patches, and attend only to each other. With
    `only_class_token`, only the class token of each image is returned.
    """
    if not isinstance(images, PackedImages):
        images = PackedImages.of(images, vit.patch_embed.patch_size)
    tokens, lengths, rotation = _embed(vit, images)
    mask = Packed(torch.tensor(lengths))
    *blocks, last = vit.blocks
    for block in blocks:
        tokens = block(tokens, mask=mask, positions=rotation)
    if not only_class_token:
        return last(tokens, mask=mask, positions=rotation)[0], lengths
    first = mask.lengths.cumsum(0) - mask.lengths
    rows = first.to(tokens.device)
    if rotation is not None:
        rotation = rotation.queries_at(rows)
    mask = Packed(torch.ones_like(mask.lengths), mask.lengths)
    tokens = last(tokens, query_tokens=rows, mask=mask, positions=rotation)
    return tokens[0], [1] * len(lengths)


def pooled(vit: ViT, tokens: Tensor, lengths: Sequence[int]) -> Annotated[Tensor, "batch dim"]:
    """Return one vector for each image of packed tokens, pooled by `vit.pooling`."""
    if vit.pooling == "class":
        return tokens
    parts = [part[vit.num_prefix_tokens :] for part in tokens.split(list(lengths))]
    if vit.pool is None:
        return torch.stack([part.mean(dim=0) for part in parts])
    counts = torch.tensor([len(part) for part in parts])
    return vit.pool(torch.cat(parts)[None], Packed(torch.ones_like(counts), counts))


def positions_on(vit: ViT, grid: Grid) -> Tensor | None:
    """Return the positions [patches, dim] to add to the patches of an image on this grid, with
    gradients; they are those of `vit.resize`. None: nothing is added."""
    table, own = vit.position_table, vit.grid
    if isinstance(table, torch.nn.Parameter):
        return resize_positions(table[0], own, grid, vit.resampling)
    if table is not None:
        return _sincos(grid, vit.dim).to(table)
    if (factorized := vit.factorized_positions) is None:
        return None
    tables, how = (factorized.row_table, factorized.column_table), vit.resampling
    rows, columns = (
        resize_positions(table, (len(table), 1), (size, 1), how, (whole, 1))
        for table, size, whole in zip(tables, grid, how.whole(grid), strict=True)
    )
    return (rows[:, None] + columns).flatten(0, 1)


def rotation_on(vit: ViT, grid: Grid, kept: Tensor | None = None) -> Rotation | None:
    """Return the rotation of the tokens of images on this grid, or only of their patches `kept`."""
    if vit.rotary is None:
        return None
    own = grid == vit.grid
    rotary = vit.rotary if own else _rotary(vit.head_dim, grid, vit.num_prefix_tokens)
    rotation = rotary.rotation(kept if own or kept is None else kept.cpu())
    return rotation if own else rotation.to(vit.rotary.cos.device, vit.rotary.cos.dtype)


def _embed(vit: ViT, images: PackedImages) -> tuple[Tensor, list[int], Rotation | None]:
    counts = [rows * columns for rows, columns in images.grids]
    tokens = embed_patches(images.patches, vit.patch_embed.weight, vit.patch_embed.bias)
    added = {grid: positions_on(vit, grid) for grid in dict.fromkeys(images.grids)}
    if any(positions is not None for positions in added.values()):
        tokens = tokens + torch.cat([added[grid] for grid in images.grids])  # type: ignore[misc]
    prefix = [token[0] for token in (vit.class_token, vit.registers) if token is not None]
    parts, lengths, rotations = [], [], []
    for part, grid in zip(tokens.split(counts), images.grids, strict=True):
        left, kept = vit.patch_dropout(part[None])  # kept is None if no patch was dropped
        parts += [*prefix, left[0]]
        lengths.append(vit.num_prefix_tokens + left.shape[1])
        rotations.append(rotation_on(vit, grid, kept))
    tokens = torch.cat(parts)[None]
    rotation = None if vit.rotary is None else Rotation.joined(rotations)  # type: ignore[arg-type]
    return vit.embed_norm(vit.dropout(tokens)), lengths, rotation


@lru_cache(_KEPT)
def _sincos(grid: Grid, dim: int) -> Tensor:
    # cached for training too, even if the first caller is in inference mode
    with torch.inference_mode(False), torch.device("cpu"):
        return sincos_2d(grid, dim)


@lru_cache(_KEPT)
def _rotary(head_dim: int, grid: Grid, num_prefix_tokens: int) -> Rotary2d:
    with torch.inference_mode(False), torch.device("cpu"):
        return Rotary2d(head_dim, grid, num_prefix_tokens=num_prefix_tokens)
