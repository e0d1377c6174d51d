"""Data modules of images: the base of those in splits, and images to predict."""

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.types import EVAL_DATALOADERS
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from attnkit.core.arguments import at_least, held_out
from attnkit.lightning.errors import UserError
from attnkit.lightning.modules.module import unknown_part, was_trained_on
from attnkit.lightning.resume.sampler import ResumableSampler
from attnkit.tasks.images.decode import (
    Depth,
    OwnSize,
    UndecodableImageError,
    depth_lines,
    read_file,
    to_channels,
)
from attnkit.tasks.images.files import list_images, say, say_skipped
from attnkit.tasks.images.module import NormalizesImages, say_tested
from attnkit.tasks.images.sizes import Fit, Size, check_fit, checked_size, fit_of, sides
from attnkit.tasks.loaders import BatchItems, SplitData, make_loader, module_of


class SplitImages(SplitData):
    """Images in splits; missing splits are taken from train.

    Each of several processes reads its own part: training images are repeated to make the parts
    equal, validation and test images never are, so that metrics are exact.

    Args:
        image_size: side in pixels, or [height, width]; None: the `image_size` of the module in
            the trainer if it has one, otherwise a size that fits the images.
        interpolation: how pictures are resized, "bicubic", "bilinear" or "nearest"; None: that of
            the module in the trainer, otherwise bicubic.
        crop_pct: share of the sides that is kept when pictures are resized to `image_size`, as in
            timm; None: that of the module in the trainer, otherwise 1, which keeps all.
        value_range: [low, high], the values of grey files of more than 8 bits that become 0 and
            255; None: those of the module in the trainer, otherwise what fits the training files.
        batch_size: images per step and process.
        num_workers: number of worker processes; None: none for images in memory that are not
            cropped, otherwise one per core up to 8, shared between the processes of this machine.
        val_fraction: share of the training images that becomes the missing validation split.
        test_fraction: share that becomes the missing test split. If no test split is given, the
            test of a trained module uses all images that it was not trained on, whatever the
            fractions and the seed; 1: the test uses all images.
        seed: seed of everything random, such as the splits and the order; the order depends besides
            only on the epoch and the process.

    Raises:
        ValueError: an argument out of range.
    """

    shuffled: type[DistributedSampler] = ResumableSampler
    make_loader: Callable[..., DataLoader] = staticmethod(make_loader)
    drop_last = False
    test_splits: tuple[str, ...] = ("test",)
    least = ""  # end of the error for a train split that is too small to be split

    def __init__(
        self,
        *,
        image_size: Size | None = None,
        interpolation: str | None = None,
        crop_pct: float | None = None,
        value_range: Sequence[float] | None = None,
        batch_size: int = 64,
        num_workers: int | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.image_size = checked_size(image_size)
        check_fit(interpolation, crop_pct, value_range)
        at_least(1, batch_size=batch_size)
        at_least(0, num_workers=num_workers, seed=seed)
        taken = {} if test_fraction == 1 else {"test_fraction": test_fraction}
        held_out(val_fraction=val_fraction, **taken)
        self.interpolation = interpolation
        self.crop_pct = crop_pct
        self.value_range = value_range
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.seed = seed
        self.sets: dict[str, Any] = {}
        self.stage: str | None = None  # the trainer's stage of the last setup
        self.testing = False  # whether data is read only to test a trained module
        # The given splits if there is no test split: the test uses what is left of them.
        self.left_of: Mapping[str, Any] = {}
        self.first_of_equal: list[int] = []  # for each training image the first equal one

    def is_read(self, stage: str | None) -> bool:
        """Record the trainer's stage; return True if its data has been read already."""
        self.stage = stage
        testing = stage == "test" and module_of(self) is not None
        if self.sets and (testing or not self.testing or "train" in self.sets):
            return True
        self.testing = testing
        return False

    @abstractmethod
    def load(self) -> Any:
        """Return the splits that exist."""

    def split_rows(self, train: Any, fractions: Sequence[float]) -> Sequence[Tensor]:
        """Return the indices of the images that stay in train, then those of each split-off
        part, drawn at random from the seed."""
        counts = [round(fraction * len(train)) for fraction in fractions]
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(self.seed))
        return [part.sort().values for part in order.split([len(train) - sum(counts), *counts])]

    def with_missing_splits(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all splits, taking missing ones from train; equal files stay together.

        If only a trained module is tested, return the test split, or the images from which
        `choose_tested` takes it.

        Raises:
            UserError: there is no train split, or a split is empty.
        """
        self.left_of = {}
        # Modules of other classes may need train, for instance to learn words.
        alone = isinstance(module_of(self), NormalizesImages) or self.test_fraction == 1
        if self.testing and "test" in given and (alone or "train" not in given):
            return {name: given[name] for name in self.test_splits}
        if self.testing and alone:
            self.left_of = given if "train" in given else {"train": only_split(given)}
            return {"test": self.left_of["train"]}
        sets, fractions = with_train(given), {"val": self.val_fraction, "test": self.test_fraction}
        names = ("train", "val", *self.test_splits)
        if missing := [name for name in names if name not in sets]:
            if "test" in missing and self.test_fraction == 1:
                raise UserError(
                    "data.test_fraction: 1 leaves nothing to train on; it is of run=test"
                )
            train = sets["train"]
            parts = self._split_whole(train, [fractions[name] for name in missing])
            for name, rows in zip(("train", *missing), parts, strict=True):
                if not len(rows):
                    taken = missing[0] if name == "train" else name
                    raise UserError(
                        f"data: {len(train)} training images are too few to take a {taken} split"
                        f"{self.least}"
                    )
                sets[name] = train.select(rows)
        if empty := [name for name in names if not len(sets[name])]:
            raise UserError(f"data: no images for {empty[0]}")
        return {name: sets[name] for name in names}

    def choose_tested(self, split: str) -> None:
        """Leave out of a test what the module was trained on, and print what is tested.

        A test split that is given, or was taken for the training, stays whole. This runs after
        `setup`, because the module knows its training images only once its checkpoint is loaded.

        Raises:
            UserError: nothing is left, or there are several splits and none is a test split.
        """
        images, module = self.left_of.get("train", self.sets[split]), module_of(self)
        if module is None:
            return
        known = was_trained_on(module, images.keys())
        if self.left_of and self.test_fraction < 1 and (known is None or known.any()):
            rows, why = self._left(images, known)
            if not len(rows):
                why = why if known is None else "all were in the module's training"
                raise UserError(
                    f"data: expected images to test, got 0 of {len(images):,}: {why}\n"
                    "  give other images, or test all of them with data.test_fraction=1"
                )
            total, images = len(images), images.select(rows)
            more = "" if known is None else unknown_part(module)
            how = f" of {total:,}; {why}{more}; data.test_fraction=1 tests all"
        else:
            if self.left_of:
                only_split(self.left_of)
            how = "; what the module was trained on is not known" if self.testing else ""
            if known is not None:
                count = int(known.sum())
                how = f", {count:,} of which were in the module's training" if count else ""
                how += unknown_part(module)
        self.sets[split] = images
        say_tested(self.trainer, split, len(images), how)

    def _left(self, images: Any, known: Tensor | None) -> tuple[Tensor, str]:
        """Return the indices of the images to test if no test split is given, and the reason."""
        if known is not None:
            return (~known).nonzero().flatten(), "the others were in the module's training"
        shares = {"val": self.val_fraction, "test": self.test_fraction}
        taken = [share for name, share in shares.items() if name not in self.left_of]
        why = f"split by data.seed={self.seed}, as what the module was trained on is not known"
        return self._split_whole(images, taken)[-1], why

    def training_keys(self) -> Tensor:
        """Return the keys of the images of train and val, int64 [images]; see
        `TaskModule`."""
        return torch.cat([self.sets[split].keys() for split in ("train", "val")])

    def _split_whole(self, train: Any, fractions: Sequence[float]) -> Sequence[Tensor]:
        """Split as `split_rows` does, but keep equal images on one side."""
        kept, whose = torch.tensor(self.first_of_equal).unique(return_inverse=True)
        if len(kept) == len(whose) or len(whose) != len(train):
            return self.split_rows(train, fractions)
        parts = self.split_rows(train.select(kept), fractions)
        return [torch.isin(whose, part).nonzero().flatten() for part in parts]

    def items(self, split: str) -> Any:
        """Return the data set that the loader of a split fetches batches from."""
        return self.sets[split]

    def loader(self, split: str) -> DataLoader:
        if split in self.test_splits:
            self.choose_tested(split)
        images, trainer = self.items(split), self.trainer
        on_gpu = trainer is not None and trainer.strategy.root_device.type == "cuda"
        loader = self.make_loader(
            self,
            images,
            split,
            "images",
            shuffled=self.shuffled,
            num_workers=self._workers(images),
            pin_memory=on_gpu,
            drop_last=self.drop_last and split == "train",
        )
        if not len(loader) and loader.drop_last:
            raise UserError(
                f"data.batch_size: {self.batch_size} is more than the {len(loader.sampler)} "  # type: ignore[arg-type]
                "training images of a process, and drop_last leaves out what is smaller"
            )
        return loader

    def _workers(self, images: Any) -> int:
        if self.num_workers is not None:
            return self.num_workers
        if not images.reads_files:
            return 0
        local = self.trainer.num_devices if self.trainer else 1
        return max(1, min(8, (os.cpu_count() or 1) // local))


def follow_module(data: Any) -> None:
    """Take options that a data module was not given from the module in its trainer."""
    module = module_of(data)
    if data.image_size is None:
        data.image_size = checked_size(getattr(module, "image_size", None))
    data.interpolation = data.interpolation or getattr(module, "interpolation", None) or "bicubic"
    data.crop_pct = data.crop_pct or getattr(module, "crop_pct", None) or 1.0
    data.value_range = data.value_range or getattr(module, "value_range", None)


def check_fits_module(data: Any) -> None:
    """Raise UserError if the module in the trainer was made for another image_size or in_channels,
    or for images whose normalisation is unknown.

    In training, a module without `value_range` gets that of the data.
    """
    module = module_of(data)
    learns = module is not None and getattr(data, "stage", None) == "fit"
    if learns and "value_range" in module.hparams and getattr(module, "value_range", 0) is None:
        module.value_range = module.hparams["value_range"] = data.value_range
    if isinstance(module, NormalizesImages):
        module.check_prepares()
    for name in ("image_size", "in_channels"):
        given, made_for = getattr(data, name), getattr(module, name, None)
        if isinstance(made_for, Sequence):
            made_for = checked_size(made_for)
        if made_for is not None and given != made_for:
            raise UserError(
                f"data.{name}: got {given}, but the module was made for {made_for}; "
                "leave it out, and images are resized to that"
            )


def only_split(sets: Mapping[str, Any]) -> Any:
    """Return the only split; raise UserError if there are several, none of them a test split."""
    if len(sets) > 1:
        raise UserError(
            f"data: no test split, only {', '.join(sets)}\n"
            "  to test one of them, give it alone: data.root=FOLDER/train"
        )
    return next(iter(sets.values()))


def with_train(sets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the splits; raise UserError if there is no train split."""
    if "train" not in sets:
        raise UserError(f"data: no train split, only {', '.join(sets) or 'nothing'}")
    return dict(sets)


class ImagePaths(BatchItems):
    """Image files, fetched by the batch.

    A batch is uint8 images [batch, channels, height, width], or a list of images of their own
    sizes, and the list of their paths. A file that cannot be decoded is printed and left out, so
    that a batch may be shorter or empty. The first file of each kind with more than 8 bits is
    printed.
    """

    def __init__(self, paths: Sequence[str], fit: Fit | OwnSize, in_channels: int) -> None:
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
        return to_channels(read.image, self.in_channels)

    def together(self, images: list[Tensor]) -> Any:
        """Join the images of a batch."""
        if images:
            return images if isinstance(self.fit, OwnSize) else torch.stack(images)
        size = (0, 0) if isinstance(self.fit, OwnSize) else sides(self.fit.size)
        return torch.empty((0, self.in_channels, *size), dtype=torch.uint8)

    def _print_depth(self, path: str, depth: Depth) -> None:
        for line in depth_lines("images", {path: depth}, self.fit.value_range):
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
            from attnkit.tasks.images.native import vit_of

            patch = vit_of(module).patch_embed.patch_size[0]
            own = OwnSize.of(self, patch, module.max_image_tokens)
            return ImagePaths(paths, own, self.in_channels)
        return ImagePaths(paths, fit_of(self), self.in_channels)

    def predict_dataloader(self) -> EVAL_DATALOADERS:
        return make_loader(self, self.images_at(self.paths), "predict", "images")
