"""What data modules of images in splits have in common."""

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from attnkit.core.arguments import at_least, held_out
from attnkit.lightning.errors import UserError
from attnkit.lightning.modules.trained_on import unknown_part, was_trained_on
from attnkit.lightning.resume.sampler import ResumableSampler
from attnkit.tasks.images.module import NormalizesImages, say_tested
from attnkit.tasks.images.sizes import Fit, Size, check_fit, checked_size
from attnkit.tasks.loaders import SplitData, make_loader


class SplitImages(SplitData):
    """Images in splits, those that are not given taken from train.

    Under several processes each reads its own part: training images are repeated to make the parts
    equal, validation and test images never are, so that metrics are exact.

    Args:
        image_size: side in pixels, or [height, width]; None: the `image_size` of the module in
            the trainer if it has one, else what fits the images.
        interpolation: how pictures are resized, "bicubic", "bilinear" or "nearest"; None: as the
            module's in the trainer, else bicubic.
        crop_pct: share of the sides that is kept when pictures of another size are brought to
            `image_size`, as timm's; None: as the module's in the trainer, else 1, which is all.
        value_range: [low, high], the values of grey files of more than 8 bits that become 0 and
            255; None: as the module's in the trainer, else what fits the training files.
        batch_size: images per step and process.
        num_workers: processes that load; None: none for images in memory that are not cropped,
            else one per core up to 8 and shared between the processes of this machine.
        val_fraction: share of the training images that becomes the missing validation split.
        test_fraction: the same for the test split. The test of a trained module, if no test split
            is given, is of all images but those it was trained on, whatever the fractions and the
            seed are; 1: of all.
        seed: of all that is random here, such as the splits and the order, which depends on the
            epoch and the process, and on nothing else.

    Raises:
        ValueError: an argument out of range.
    """

    shuffled: type[DistributedSampler] = ResumableSampler
    make_loader: Callable[..., DataLoader] = staticmethod(make_loader)
    drop_last = False
    test_splits: tuple[str, ...] = ("test",)
    least = ""  # what train must have to be split, as the end of an error

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
        self.stage: str | None = None  # of the trainer, that it was last set up for
        self.testing = False  # whether it is read for the test of a trained module alone
        # For that, the splits that are given, where a test split is not: what is left is tested.
        self.left_of: Mapping[str, Any] = {}
        self.first_of_equal: list[int] = []  # of each training image the first with the same bytes

    def is_read(self, stage: str | None) -> bool:
        """Whether there is nothing to read for a stage of the trainer, which is noted."""
        self.stage = stage
        testing = stage == "test" and module_of(self) is not None
        if self.sets and (testing or not self.testing or "train" in self.sets):
            return True
        self.testing = testing
        return False

    @abstractmethod
    def load(self) -> Any:
        """The splits that there are."""

    @abstractmethod
    def split_rows(self, train: Any, fractions: Sequence[float]) -> Sequence[Tensor]:
        """Numbers of the images of train that stay, then of each part that is taken from it."""

    def with_missing_splits(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All splits; those that are not given are taken from train. Equal files stay together.

        For the test of a trained module alone: the test split, or what it is taken from by
        `choose_tested`.

        Raises:
            UserError: there is no train split, or a split is empty.
        """
        self.left_of = {}
        # Other modules may have something to learn from train, such as words.
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
        """Leave out of a test what the module was trained on, and say what the test is of.

        A test split that is given, or that was taken for a training, stays whole. The module knows
        what it was trained on once its checkpoint is loaded, which is after `setup`.

        Raises:
            UserError: nothing is left, or of several new splits none is for a test.
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
        """Numbers of the images that a test is of where no test split is given, and why."""
        if known is not None:
            return (~known).nonzero().flatten(), "the others were in the module's training"
        shares = {"val": self.val_fraction, "test": self.test_fraction}
        taken = [share for name, share in shares.items() if name not in self.left_of]
        why = f"split by data.seed={self.seed}, as what the module was trained on is not known"
        return self._split_whole(images, taken)[-1], why

    def training_keys(self) -> Tensor:
        """Keys of the images of train and val, int64 [images]; see `KnowsItsTraining`."""
        return torch.cat([self.sets[split].keys() for split in ("train", "val")])

    def _split_whole(self, train: Any, fractions: Sequence[float]) -> Sequence[Tensor]:
        """`split_rows`, but equal images are on one side."""
        kept, whose = torch.tensor(self.first_of_equal).unique(return_inverse=True)
        if len(kept) == len(whose) or len(whose) != len(train):
            return self.split_rows(train, fractions)
        parts = self.split_rows(train.select(kept), fractions)
        return [torch.isin(whose, part).nonzero().flatten() for part in parts]

    def items(self, split: str) -> Any:
        """What the loader of a split fetches batches from."""
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


def fit_of(data: Any, size: Size | None = None) -> Fit:
    """How pictures become images, of a data module that is set up, or for images of a size."""
    how = data.interpolation or "bicubic", data.crop_pct or 1.0, data.value_range
    return Fit(size or data.image_size, *how)


def module_of(data: LightningDataModule) -> Any:
    """The module in a data module's trainer; None: there is none."""
    return data.trainer.lightning_module if data.trainer is not None else None


def follow_module(data: Any) -> None:
    """What a data module was not given is as the module in its trainer was made for."""
    module = module_of(data)
    if data.image_size is None:
        data.image_size = checked_size(getattr(module, "image_size", None))
    data.interpolation = data.interpolation or getattr(module, "interpolation", None) or "bicubic"
    data.crop_pct = data.crop_pct or getattr(module, "crop_pct", None) or 1.0
    data.value_range = data.value_range or getattr(module, "value_range", None)


def check_fits_module(data: Any) -> None:
    """UserError if the module in the trainer was made for another image_size or in_channels, or
    for images that are normalised in a way that is not known.

    In training, a module that does not know the range of values of the files is told.
    """
    module = module_of(data)
    learns = module is not None and getattr(data, "stage", None) == "fit"
    if learns and "value_range" in module.hparams and getattr(module, "value_range", 0) is None:
        module.value_range = module.hparams["value_range"] = data.value_range
    if isinstance(module, NormalizesImages):
        module.check_prepares()
    for name in ("image_size", "in_channels"):
        asked, made_for = getattr(data, name), getattr(module, name, None)
        if isinstance(made_for, Sequence):
            made_for = checked_size(made_for)
        if made_for is not None and asked != made_for:
            raise UserError(
                f"data.{name}: got {asked}, but the module was made for {made_for}; "
                "leave it out, and images are resized to that"
            )


def only_split(sets: Mapping[str, Any]) -> Any:
    """The images of the only split, which nobody has called a test split."""
    if len(sets) > 1:
        raise UserError(
            f"data: no test split, only {', '.join(sets)}\n"
            "  to test one of them, give it alone: data.root=FOLDER/train"
        )
    return next(iter(sets.values()))


def with_train(sets: Mapping[str, Any]) -> dict[str, Any]:
    """The splits that are given; without one to train on, an error."""
    if "train" not in sets:
        raise UserError(f"data: no train split, only {', '.join(sets) or 'nothing'}")
    return dict(sets)
