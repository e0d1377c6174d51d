"""Images that keep their size and aspect ratio: sides of whole patches, batches of lists."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from lightning import LightningDataModule
from torch import Tensor

from attnkit.core.arguments import at_least
from attnkit.lightning.errors import UserError
from attnkit.tasks.images.decode import (
    OwnSize,
)
from attnkit.tasks.images.files import Files
from attnkit.tasks.images.scan import read_splits
from attnkit.tasks.images.sets import ImageSet
from attnkit.tasks.loaders import BatchItems, TokenSampler, module_of, token_loader


class NativeItems(BatchItems):
    """Images fetched by lists of indices, or of pairs (epoch, index), of a `TokenSampler`.

    Args:
        images: the set; its `sizes` are the numbers of patches.
        batch_tokens: maximum number of patches of a batch, for the sampler.
    """

    def __init__(self, images: Any, batch_tokens: int) -> None:
        self.images, self.batch_tokens = images, batch_tokens
        self.sizes, self.reads_files = images.sizes, images.reads_files

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, numbers: Sequence[Any]) -> Any:
        lists = (some if isinstance(some, list) else [some] for some in numbers)
        return self.images.__getitems__([*chain.from_iterable(lists)])


def crop_patches(image: Tensor, min_area: float, patch_size: int) -> Tensor:
    """Crop a random part of whole patches, with about the image's aspect ratio and at least about
    this share of its area. Nothing is resized, so that a smaller part has fewer tokens."""
    grid = image.shape[-2] // patch_size, image.shape[-1] // patch_size
    side = math.sqrt(min_area + (1 - min_area) * float(torch.rand(())))
    height, width = (max(1, round(count * side)) * patch_size for count in grid)
    top = int(torch.randint(image.shape[-2] - height + 1, ()))
    left = int(torch.randint(image.shape[-1] - width + 1, ()))
    return image[..., top : top + height, left : left + width]


class KeepsSizes(LightningDataModule):
    """Mixin for data modules of image files that can keep the sizes of images (`native`).

    It stands before the base class of the task.
    """

    native = False
    crop_pct: float | None
    sets: dict[str, Any]
    make_loader: Any
    shuffled: Any

    def set_native(
        self,
        native: bool,
        max_tokens: int | None,
        max_image_tokens: int | None,
        patch_size: int | None,
        *,
        shuffled: type[TokenSampler],
        **excluded: Any,
    ) -> None:
        """Set `native` and the options that depend on it.

        Args:
            native, max_tokens, max_image_tokens, patch_size: as in `ImageFolderData`.
            shuffled: the sampler of training.
            **excluded: options that must be None with `native`.

        Raises:
            ValueError: an option needs `native`, or `native` excludes it.
        """
        given = {
            "max_tokens": max_tokens,
            "max_image_tokens": max_image_tokens,
            "patch_size": patch_size,
        }
        at_least(2, **given)
        self.native = native
        if not native:
            if named := [name for name, value in given.items() if value is not None]:
                raise ValueError(f"{named[0]}: needs native=True, got {given[named[0]]}")
            return
        excluded["crop_pct"] = None if self.crop_pct == 1 else self.crop_pct
        if named := [name for name, value in excluded.items() if value is not None]:
            raise ValueError(f"{named[0]}: not with native=True, got {excluded[named[0]]}")
        self.max_tokens = max_tokens or 4096
        self.max_image_tokens = max_image_tokens or min(1024, max(1, self.max_tokens // 4))
        self.patch_size = patch_size or 16
        if 2 * self.max_image_tokens > self.max_tokens:
            raise ValueError(
                f"max_image_tokens: expected at most half of max_tokens={self.max_tokens}, got "
                f"{self.max_image_tokens}"
            )
        self.make_loader, self.shuffled = token_loader, shuffled

    def read(
        self, splits: Mapping[str, Files], channels: int | None, kept_area: float | None = None
    ) -> dict[str, tuple[ImageSet, Tensor]]:
        """Read the images of each split with `read_splits`."""
        if not self.native:
            return read_splits(self, splits, channels, kept_area)
        own = OwnSize.of(self, self.patch_size, self.max_image_tokens)
        return read_splits(self, splits, channels, own=own)

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)  # type: ignore[arg-type]
        if self.native:
            check_native(self)

    def describe(self) -> dict[str, Any]:
        facts: dict[str, Any] = super().describe()  # type: ignore[misc]
        if not self.native:
            return facts
        own = {"native": True, "patch_size": self.patch_size}
        return {**facts, **own, "max_image_tokens": self.max_image_tokens}

    def items(self, split: str) -> Any:
        if not self.native:
            return super().items(split)  # type: ignore[misc]
        images = self.sets[split]
        # A training batch may exceed the limit by up to the largest image: see `TokenSampler`.
        more = int(images.sizes.max()) if split == "train" else 0
        return NativeItems(images, self.max_tokens - more)


def vit_of(module: Any) -> Any:
    """Return the network that reads a module's images: its model, or the ViT of its encoder."""
    model = getattr(module, "model", None)
    encoder = getattr(model, "encoder", model)
    return getattr(encoder, "vit", encoder)


def check_native(data: Any) -> None:
    """Raise UserError if the module in the trainer does not take images of different sizes."""
    module = module_of(data)
    if module is None:
        return
    vit = vit_of(module)
    if not getattr(vit, "native", False):
        of_encoder = hasattr(module.model, "encoder")
        wanted = "encoder=vit, with encoder." if of_encoder else "attnkit.ViT with model."
        raise UserError(
            f"data.native: {type(vit).__name__} takes images of one size alone; expected "
            f"{wanted}native=true"
        )
    if getattr(module, "mix", None) is not None:
        raise UserError(
            "module.mixup, module.cutmix: they mix images of one size, and those of "
            "data.native=true have their own; expected 0"
        )
    patch = tuple(vit.patch_embed.patch_size)
    if patch != (data.patch_size, data.patch_size):
        raise UserError(
            f"data.patch_size: got {data.patch_size}, but the model has patches of "
            f"{patch[0]} × {patch[1]}; data.patch_size={patch[0]}"
        )
