"""Image classification: `ImageClassification` learns what an `ImageDataModule` reads."""

from attnkit.tasks.image_classification.augment import Augment
from attnkit.tasks.image_classification.cifar10 import CIFAR10Data
from attnkit.tasks.image_classification.data import ImageDataModule
from attnkit.tasks.image_classification.digits import DigitsData
from attnkit.tasks.image_classification.image_folder import ImageFolderData
from attnkit.tasks.image_classification.module import ImageClassification
from attnkit.tasks.image_classification.network import attention_network
from attnkit.tasks.images.predict import ImagePaths, PredictData
from attnkit.tasks.images.sets import FileImages, ImageSet, MemoryImages

__all__ = [
    "Augment",
    "CIFAR10Data",
    "DigitsData",
    "FileImages",
    "ImageClassification",
    "ImageDataModule",
    "ImageFolderData",
    "ImagePaths",
    "ImageSet",
    "MemoryImages",
    "PredictData",
    "attention_network",
]
