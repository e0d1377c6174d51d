"""The default data: scenes drawn from a seed with the class of each pixel, without a network."""

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
    """Scenes of two things, as those of the captions (see `ScenesData`): which of 7 shapes, or
    whether a handwritten digit, is seen at each pixel, else the background. 9 classes.

    Things have 8 colours, 2 sizes and 4 textures, and one may lie inside the other. The digits are
    scikit-learn's; each of them is in one split only. Of the seed alone depend the scenes.

    Args:
        num_train, num_val, num_test: scenes of each split.
        image_size: side in pixels, at least 24; None: the module's in the trainer, or 48.
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
        """As `SegmentationDataModule.describe`; 8 patches a side suffice where they are whole."""
        found = super().describe()
        side, _ = sides(found["image_size"])
        return {**found, "patch_size": side // 8 if side % 8 == 0 else found["patch_size"]}


def draw_scenes(
    split: str, count: int, side: int, digits: dict[str, np.ndarray], seed: int
) -> MaskedImages:
    """`count` scenes of a split: the seed and the split's name decide all of them."""
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
