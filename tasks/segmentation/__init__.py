"""Semantic segmentation: a class for every pixel, on generated scenes or your own files."""

from typing import TYPE_CHECKING

from attnkit.core.names import lazy

if TYPE_CHECKING:
    from attnkit.tasks.segmentation.data import MaskedImages as MaskedImages
    from attnkit.tasks.segmentation.data import PicturesToSegment as PicturesToSegment
    from attnkit.tasks.segmentation.data import SceneMasksData as SceneMasksData
    from attnkit.tasks.segmentation.data import SegmentationDataModule as SegmentationDataModule
    from attnkit.tasks.segmentation.files import SegmentationFilesData as SegmentationFilesData
    from attnkit.tasks.segmentation.module import SemanticSegmentation as SemanticSegmentation
    from attnkit.tasks.segmentation.module import dice_loss as dice_loss
    from attnkit.tasks.segmentation.report import SegmentationReport as SegmentationReport
    from attnkit.tasks.segmentation.segmenter import ConvolutionalHead as ConvolutionalHead
    from attnkit.tasks.segmentation.segmenter import LinearHead as LinearHead
    from attnkit.tasks.segmentation.segmenter import QueryHead as QueryHead
    from attnkit.tasks.segmentation.segmenter import Segmenter as Segmenter
else:
    __getattr__, __dir__ = lazy(__name__)
