"""Data module of image folders, one folder per class."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnkit.core.arguments import at_least, existing
from attnkit.lightning.errors import UserError
from attnkit.tasks.image_classification.augment import Augment, shipped_augment
from attnkit.tasks.image_classification.data import ImageDataModule
from attnkit.tasks.images.data import module_of
from attnkit.tasks.images.folder import find_splits
from attnkit.tasks.images.native import KeepsSizes, crop_patches
from attnkit.tasks.images.sets import ImageSet
from attnkit.tasks.tokens import TokenSampler


class ImageFolderData(KeepsSizes, ImageDataModule):
    """Images under `root`: `train/`, and if given `val/` and `test/`, with a folder per class.

    Other usual spellings are read too, such as `Training/`, `dev/` or `eval/`. `root` may also hold
    the class folders themselves. Images may have any size and mode: the largest centred part with
    the aspect ratio of `image_size` is used (default: a square of the median short side of the
    training images, at most 224, rounded down to whole patches). `root` is never written to.

    `Trainer.test` of a trained module uses the test split, or if there is none, the files that the
    module was not trained on; classes of the module may be missing there.

    If `augment` has a `crop_min_area`, training images are crops of the whole pictures. These are
    first shrunk by a whole factor, such that the smallest crop, or one of half the area, still has
    as many pixels as `image_size`.

    Each file is decoded once, before training; the pixels stay in memory if all splits, and the
    whole pictures twice, fit in `memory_gb`. Otherwise each file is decoded once to check it (the
    result is kept in the user's cache folder until a file changes) and again whenever a batch needs
    it, in `num_workers` processes; the pixels are the same.

    Args:
        root: the folder.
        skip_corrupt: leave out files that cannot be decoded, however many. Otherwise more than 1 %
            of a split, or one such file in a given val or test folder, is an error.
        memory_gb: gigabytes (10⁹ bytes) of pixels that this process may hold; None: half of what is
            available, shared between the processes of this machine.
        native: images keep their size and aspect ratio, and a batch is a list of them, for a model
            that takes lists, such as `attnkit.ViT`. Each side becomes the nearest multiple of the
            patch. `image_size` is then only the size whose positions the model learns; positions of
            other sizes are resampled. Training images are crops of at least `crop_min_area`, of
            whole patches, and are not resized.
        max_tokens: maximum number of patches of a batch, instead of `batch_size`; None: 4096. This
            and the next two arguments need `native`.
        max_image_tokens: maximum number of patches of an image, up to half of `max_tokens`; None: a
            quarter of `max_tokens`, at most 1024. A larger picture is shrunk, with its aspect
            ratio.
        patch_size: side in pixels of the model's patches; None: 16.

    The other arguments are those of `ImageDataModule`.

    Raises:
        ValueError: `root` is not a folder, or an option needs `native` or is excluded by it.
        UserError: in `setup`, if the folders or files do not have this form.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        skip_corrupt: bool = False,
        memory_gb: float | None = None,
        native: bool = False,
        max_tokens: int | None = None,
        max_image_tokens: int | None = None,
        patch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        at_least(0, memory_gb=memory_gb)
        tokens = max_tokens, max_image_tokens, patch_size
        excluded: dict[str, Any] = {"sampling": self.sampling, "drop_last": self.drop_last or None}
        self.set_native(native, *tokens, shuffled=TokenSampler, **excluded)
        self.root = existing("root", root, folder=True)
        self.skip_corrupt = skip_corrupt
        self.memory_gb = memory_gb

    def default_augment(self) -> Augment:
        return shipped_augment("image_folder")

    def load(self) -> tuple[Mapping[str, ImageSet], list[str]]:
        known = module_of(self).hparams.get("class_names") if self.testing else None
        splits, class_names = find_splits(self.root, known)
        read = self.read(splits, self.in_channels, self.kept_crop_area)
        sets = {split: images.select(good) for split, (images, good) in read.items()}
        left = set(sets["train"].labels.tolist()) if known is None else range(len(known))
        if empty := [name for label, name in enumerate(class_names) if label not in left]:
            names = ", ".join(empty[:5])
            raise UserError(f"data.root: no image can be decoded in train of {names}")
        return sets, class_names

    def default_size(self, images: ImageSet) -> int:
        return images.size if self.native else super().default_size(images)  # type: ignore[return-value]

    def fitted_images(self, images: Any, *, cropped: bool) -> Any:
        return images if self.native else super().fitted_images(images, cropped=cropped)

    def augmented(self, images: Any, *, cropped: bool) -> Any:
        if not self.native:
            return super().augmented(images, cropped=cropped)
        if self.crop_min_area is not None:
            images = [crop_patches(image, self.crop_min_area, self.patch_size) for image in images]
        return [
            super(ImageFolderData, self).augmented(one[None], cropped=cropped)[0] for one in images
        ]
