"""Data module of pictures to segment: a folder or a file, each at its own size."""

from collections.abc import Sequence

from torch import Tensor

from attnkit.tasks.images.data import fit_of
from attnkit.tasks.images.decode import as_tensor, read_picture
from attnkit.tasks.images.predict import ImagePaths, PredictData


class PicturePaths(ImagePaths):
    """Picture files, fetched by the batch as in `ImagePaths`.

    A batch is a list of whole pictures, uint8 [3, height, width], and a list of their paths.
    """

    def read(self, path: str) -> Tensor:
        return as_tensor(read_picture(path, None, self.fit.value_range))

    def together(self, images: list[Tensor]) -> list[Tensor]:
        return images


class PicturesToSegment(PredictData):
    """Pictures under a folder (at any depth) or one image file, for `Trainer.predict`.

    It differs from `PredictData` in that pictures keep their size: see `PicturePaths`.
    """

    def images_at(self, paths: Sequence[str]) -> PicturePaths:
        return PicturePaths(paths, fit_of(self), self.in_channels)
