"""Data module of images to predict: a folder or a file, prepared as in training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.types import EVAL_DATALOADERS
from torch import Tensor

from attnkit.core.arguments import at_least
from attnkit.lightning.errors import UserError
from attnkit.tasks.images.data import check_fits_module, fit_of, follow_module, module_of
from attnkit.tasks.images.decode import Depth, UndecodableImageError, read_file, to_channels
from attnkit.tasks.images.depths import lines
from attnkit.tasks.images.folder import list_images, say, say_skipped
from attnkit.tasks.images.sizes import Fit, Size, check_fit, checked_size, sides
from attnkit.tasks.loaders import BatchItems, make_loader


class ImagePaths(BatchItems):
    """Image files, fetched by the batch.

    A batch is uint8 images [batch, channels, height, width] and the list of their paths. A file
    that cannot be decoded is printed and left out, so that a batch may be shorter or empty. The
    first file of each kind with more than 8 bits is printed.
    """

    def __init__(self, paths: Sequence[str], fit: Fit, in_channels: int) -> None:
        self.paths = list(paths)
        self.fit, self.in_channels = fit, in_channels
        self._printed: set[str] = set()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        images, paths = [], []
        for path in (self.paths[number] for number in numbers):
            try:
                images.append(self.read(path))
            except UndecodableImageError as error:
                say(f"left out: {path} ({error})")
                continue
            paths.append(path)
        return self.together(images), paths

    def read(self, path: str) -> Tensor:
        """Read the image of a file."""
        read = read_file(path, self.fit)
        if read.depth is not None:
            self._print_depth(path, read.depth)
        return read.image

    def together(self, images: list[Tensor]) -> Any:
        """Join the images of a batch."""
        if not images:
            shape = (0, self.in_channels, *sides(self.fit.size))
            return torch.empty(shape, dtype=torch.uint8)
        return to_channels(torch.stack(images), self.in_channels)

    def _print_depth(self, path: str, depth: Depth) -> None:
        for line in lines("images", {path: depth}, self.fit.value_range):
            kind = f"{depth[0]}, {'cut off' in line}"
            if kind not in self._printed:
                say(line)
            self._printed.add(kind)


class PredictData(LightningDataModule):
    """Images under a folder (at any depth) or one image file, for `Trainer.predict`.

    Args:
        images: the folder or file.
        image_size: side in pixels, or [height, width]; `module.image_size` of the trained module.
        in_channels: 1 (grey) or 3 (RGB); `module.in_channels`.
        interpolation, crop_pct, value_range: how pictures are resized: see `Fit`; None: as in the
            module in the trainer, otherwise bicubic, 1, and all values of 16 bits.
        batch_size: images per step and process.
        num_workers: processes that decode.

    Raises:
        ValueError: `images` is neither a folder nor a file, or another argument is out of range.
        UserError: in `setup`, if the folder holds no images, or the module in the trainer was made
            for images of another size or number of channels.
    """

    def __init__(
        self,
        images: str | Path,
        *,
        image_size: Size,
        in_channels: int = 3,
        interpolation: str | None = None,
        crop_pct: float | None = None,
        value_range: Sequence[float] | None = None,
        batch_size: int = 64,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        # There may be fewer images than processes.
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self.images = Path(images).expanduser().absolute()
        if not self.images.exists():
            raise ValueError(f"images: no such file or folder: {images}")
        if image_size is None:
            raise ValueError("image_size: expected the side the model was trained on, got None")
        self.image_size = checked_size(image_size)
        check_fit(interpolation, crop_pct, value_range)
        if in_channels not in (1, 3):
            raise ValueError(f"in_channels: expected 1 or 3, got {in_channels}")
        at_least(1, batch_size=batch_size)
        at_least(0, num_workers=num_workers)
        self.interpolation = interpolation
        self.crop_pct = crop_pct
        self.value_range = value_range
        self.in_channels = in_channels
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.paths: list[str] = []

    def setup(self, stage: str | None = None) -> None:
        follow_module(self)
        check_fits_module(self)
        self.paths = [str(self.images)]
        if self.images.is_dir():
            skipped: list[str] = []
            self.paths = list_images(self.images, skipped)
            say_skipped(self.images, skipped)
        if not self.paths:
            raise UserError(f"images: no image files under {self.images}")

    def images_at(self, paths: Sequence[str]) -> BatchItems:
        """Return the data set; subclasses override this if their batches have another form."""
        module = module_of(self)
        if getattr(module, "max_image_tokens", None):
            from attnkit.tasks.images.native import NativePaths, OwnSize, vit_of

            patch = vit_of(module).patch_embed.patch_size[0]
            how = OwnSize.of(self, patch, module.max_image_tokens)
            return NativePaths(paths, how, self.in_channels)
        return ImagePaths(paths, fit_of(self), self.in_channels)

    def predict_dataloader(self) -> EVAL_DATALOADERS:
        return make_loader(self, self.images_at(self.paths), "predict", "images")
