"""Data module of images to caption: a folder or a file, prepared as in training."""

from collections.abc import Sequence
from typing import Any

from attnkit.tasks.images.predict import PredictData
from attnkit.tasks.loaders import BatchItems


class CaptionPaths(BatchItems):
    """Wraps a set of images and paths; a batch is a dict of `image` and `path`."""

    def __init__(self, pairs: BatchItems) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)  # type: ignore[arg-type]

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        images, paths = self.pairs.__getitems__(numbers)
        return {"image": images, "path": paths}


class CaptionPredictData(PredictData):
    """Images under a folder (at any depth) or one image file, for `Trainer.predict`.

    It differs from `PredictData` only in the form of a batch, which is that of `CaptionPaths`.
    """

    def images_at(self, paths: Sequence[str]) -> CaptionPaths:
        return CaptionPaths(super().images_at(paths))
