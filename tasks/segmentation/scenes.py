"""The default data of segmentation: scenes drawn from a seed, without a download."""

from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
import torch

from attnkit.core.arguments import at_least
from attnkit.tasks.captioning.drawing import draw
from attnkit.tasks.captioning.scenes import SHAPES, draw_scene
from attnkit.tasks.captioning.scenes_data import handwriting
from attnkit.tasks.images.sizes import sides
from attnkit.tasks.segmentation.data import SegmentationDataModule
from attnkit.tasks.segmentation.sets import MaskedImages


class SceneMasksData(SegmentationDataModule):
    """Scenes of two things, drawn as in `ScenesData`, with a class for each pixel.

    The 9 classes are 7 shapes, handwritten digits and the background. Things have 8 colours, 2
    sizes and 4 textures, and one may lie inside the other. The digits are scikit-learn's; each of
    them is in one split only. The scenes depend on the seed alone.

    Args:
        num_train, num_val, num_test: number of scenes of each split.
        image_size: side in pixels, at least 24; None: that of the module in the trainer, or 48.
        **options: `batch_size`, `num_workers` and `seed`.
    """

    def __init__(
        self,
        *,
        num_train: int = 8000,
        num_val: int = 200,
        num_test: int = 500,
        image_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(image_size=image_size, **options)
        at_least(1, num_train=num_train, num_val=num_val, num_test=num_test)
        at_least(24, image_size=image_size)
        self.counts = {"train": num_train, "val": num_val, "test": num_test}

    def load(self) -> tuple[Mapping[str, MaskedImages], list[str]]:
        side, _ = sides(self.image_size or 48)
        parts = zip(self.counts.items(), handwriting(self.seed), strict=True)
        sets = {
            split: draw_scenes(split, count, side, digits, self.seed)
            for (split, count), digits in parts
        }
        return sets, ["background", *SHAPES, "digit"]

    def describe(self) -> dict[str, Any]:
        """Describe the data as the base class does; use 8 patches a side if they are whole."""
        found = super().describe()
        side, _ = sides(found["image_size"])
        return {**found, "patch_size": side // 8 if side % 8 == 0 else found["patch_size"]}


def draw_scenes(
    split: str, count: int, side: int, digits: dict[str, np.ndarray], seed: int
) -> MaskedImages:
    """Return `count` scenes, which depend only on the seed and the name of the split."""
    random = Random(f"{seed} {split}")
    images = torch.empty((count, 3, side, side), dtype=torch.uint8)
    masks = torch.zeros((count, side, side), dtype=torch.uint8)
    for image, mask in zip(images, masks, strict=True):
        scene = draw_scene(random)
        picture = draw(scene, side, digits, random)
        image.copy_(torch.from_numpy(picture.image))
        for thing, seen in zip(scene["objects"], picture.masks, strict=True):
            kind = thing["kind"]
            number = 1 + (SHAPES.index(kind) if kind in SHAPES else len(SHAPES))
            mask[torch.from_numpy(seen)] = number
    return MaskedImages(images, masks)
