"""Image classification: data modules, augmentation, and the modules that learn classes or
values."""

from typing import TYPE_CHECKING

from attnkit.core.names import lazy

if TYPE_CHECKING:
    from attnkit.tasks.image_classification.augment import Augment as Augment
    from attnkit.tasks.image_classification.composed import DigitGrid as DigitGrid
    from attnkit.tasks.image_classification.composed import NeedleDigits as NeedleDigits
    from attnkit.tasks.image_classification.composed import (
        PlantedShortcut as PlantedShortcut,
    )
    from attnkit.tasks.image_classification.data import CIFAR10Data as CIFAR10Data
    from attnkit.tasks.image_classification.data import DigitsData as DigitsData
    from attnkit.tasks.image_classification.data import ImageDataModule as ImageDataModule
    from attnkit.tasks.image_classification.describe import describe_batches as describe_batches
    from attnkit.tasks.image_classification.files import ImageCsvData as ImageCsvData
    from attnkit.tasks.image_classification.files import ImageFolderData as ImageFolderData
    from attnkit.tasks.image_classification.module import ImageClassification as ImageClassification
    from attnkit.tasks.image_classification.network import attention_network as attention_network
    from attnkit.tasks.image_classification.values import ImageValues as ImageValues
    from attnkit.tasks.images.data import ImagePaths as ImagePaths
    from attnkit.tasks.images.data import PredictData as PredictData
    from attnkit.tasks.images.sets import FileImages as FileImages
    from attnkit.tasks.images.sets import ImageSet as ImageSet
    from attnkit.tasks.images.sets import KnowsTruth as KnowsTruth
    from attnkit.tasks.images.sets import MemoryImages as MemoryImages
    from attnkit.tasks.images.sets import Truth as Truth
else:
    __getattr__, __dir__ = lazy(__name__)
