"""The default data of captioning: scenes drawn from a seed, without a download."""

from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
import torch

from attnkit.core.arguments import at_least
from attnkit.lightning.resume.sampler import stratified_split
from attnkit.tasks.captioning.data import CaptionDataModule
from attnkit.tasks.captioning.drawing import draw
from attnkit.tasks.captioning.grammar import captions_of, words_of_objects
from attnkit.tasks.captioning.scenes import DIGITS, draw_scene
from attnkit.tasks.captioning.sets import CaptionSet
from attnkit.tasks.images.sets import MemoryImages
from attnkit.tasks.images.sizes import sides
from attnkit.tasks.images.truth import Truth

_DIGIT_FRACTIONS = [0.1, 0.2]  # shares of the handwritten digits in val and in both test splits


class ScenesData(CaptionDataModule):
    """Two things in a relation, such as "a small red seven left of a large striped blue square".

    A picture shows two of 7 shapes and 10 handwritten digits, in 8 colours, 2 sizes and 4 textures;
    one is left of, above or inside the other. It has five different captions from a grammar of 76
    words. There are two test splits. "test" is drawn as the training scenes are; every scene of
    "compositional" has a kind in a colour that training shows only apart (`HELD_OUT`). The digits
    are scikit-learn's 8 × 8 images (see `DigitsData`), tinted and enlarged; each of them is in only
    one of train, val and the tests.

    Batches of val and test also have `id` (list of str), `scene` (list of `Scene`, plain dicts) and
    `masks`, bool [batch, 2, image_size, image_size]: the visible pixels of the first and second
    object. Scenes and captions depend on the seed alone, on every machine; pixels also depend on
    the version of Pillow.

    Args:
        num_train, num_val, num_test: number of scenes of train, of val, and of each test split.
        image_size: side in pixels, at least 24; None: that of the module in the trainer, or 48.
        min_count: as in `CaptionDataModule`.
        **options: other arguments of `CaptionDataModule`, except fractions: each split is
            generated.
    """

    test_splits = ("test", "compositional")

    def __init__(
        self,
        *,
        num_train: int = 16000,
        num_val: int = 400,
        num_test: int = 500,
        image_size: int | None = None,
        min_count: int = 1,
        **options: Any,
    ) -> None:
        for name in ("val_fraction", "test_fraction"):
            if name in options:
                raise TypeError(
                    f"{name}: scenes are generated, not split; use num_val and num_test"
                )
        for name in ("interpolation", "crop_pct"):
            if options.get(name) is not None:
                raise TypeError(f"{name}: scenes are drawn at image_size, not resized")
        super().__init__(image_size=image_size, min_count=min_count, **options)
        at_least(1, num_train=num_train, num_val=num_val, num_test=num_test)
        at_least(24, image_size=image_size)
        numbers = (num_train, num_val, num_test, num_test)
        self.counts = dict(zip(("train", "val", *self.test_splits), numbers, strict=True))

    def load(self) -> Mapping[str, CaptionSet]:
        side, _ = sides(self.image_size or 48)
        train, val, test = handwriting(self.seed)
        parts = zip(self.counts.items(), (train, val, test, test), strict=True)
        return {
            split: compose(split, count, side, digits, self.seed)
            for (split, count), digits in parts
        }

    def truth(self, split: str = "test") -> Truth:
        """Return, after `setup`, images of val or a test split and the masks of their things."""
        scenes = self.sets.get(split)
        if scenes is None or "masks" not in scenes.others:
            raise RuntimeError(f"truth: {split!r} has no masks; val, test and compositional have")
        everything = scenes.others["scene"]

        def objects_of(image: int, sentence: str) -> list[tuple[int, int]]:
            return words_of_objects(sentence, everything[image])

        images = scenes.images.fetch(torch.arange(len(scenes)))
        return Truth(images, scenes.others["masks"], objects_of=objects_of)


def handwriting(seed: int) -> list[dict[str, np.ndarray]]:
    """Return for train, val and test the images of each digit by name, uint8 [images, 8, 8]."""
    from sklearn.datasets import load_digits  # takes half a second, which only this data needs

    found = load_digits()
    images = np.rint(found.images * (255 / 16)).astype(np.uint8)  # 17 grey values, 0 to 16
    parts = stratified_split(torch.from_numpy(found.target), _DIGIT_FRACTIONS, seed)
    return [
        {name: images[part][found.target[part] == number] for number, name in enumerate(DIGITS)}
        for part in (rows.numpy() for rows in parts)
    ]


def compose(
    split: str, count: int, side: int, digits: dict[str, np.ndarray], seed: int
) -> CaptionSet:
    """Return `count` scenes, which depend only on the seed and the name of the split."""
    random = Random(f"{seed} {split}")
    images = torch.empty((count, 3, side, side), dtype=torch.uint8)
    masks = torch.empty((count, 2, side, side), dtype=torch.bool)
    scenes, captions = [], []
    for number in range(count):
        scene = draw_scene(random, compositional=split == "compositional")
        scenes.append(scene)
        captions.append(captions_of(scene, random))
        picture = draw(scene, side, digits, random)
        images[number] = torch.from_numpy(picture.image)
        masks[number] = torch.from_numpy(picture.masks)
    # Training reads pixels and words only.
    others = {"id": [f"{split}/{n}" for n in range(count)], "scene": scenes, "masks": masks}
    pixels = MemoryImages(images, torch.zeros(count))
    return CaptionSet(pixels, captions, {} if split == "train" else others)
