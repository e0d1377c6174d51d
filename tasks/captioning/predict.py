"""Images to caption: a folder or a file, prepared as the training images were."""

from collections.abc import Sequence
from typing import Any

from attnkit.tasks.images.data import fit_of
from attnkit.tasks.images.predict import ImagePaths, PredictData


class CaptionPaths(ImagePaths):
    """As `ImagePaths`; a batch is a dict of `image` and `path`, and has no captions."""

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        images, paths = super().__getitems__(numbers)
        return {"image": images, "path": paths}


class CaptionPredictData(PredictData):
    """The images under a folder (at any depth) or one image file, for `Trainer.predict`.

    As `PredictData`, but for the form of a batch: `CaptionPaths`.
    """

    def images_at(self, paths: Sequence[str]) -> CaptionPaths:
        return CaptionPaths(paths, fit_of(self), self.in_channels)
