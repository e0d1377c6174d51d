"""Image captioning: data modules of captioned images, tokenizers, and scenes made from a seed."""

from attnkit.tasks.captioning.caption_csv import CaptionCsvData
from attnkit.tasks.captioning.coco import CocoCaptionsData
from attnkit.tasks.captioning.data import CaptionDataModule
from attnkit.tasks.captioning.files import CaptionFilesData
from attnkit.tasks.captioning.grammar import (
    EVERYTHING,
    attribute_of,
    captions_of,
    is_right,
    parse_caption,
    words_of_objects,
)
from attnkit.tasks.captioning.karpathy import KarpathyData
from attnkit.tasks.captioning.looks import Look, ObjectLooks, WordLooks
from attnkit.tasks.captioning.module import ImageCaptioning
from attnkit.tasks.captioning.predict import CaptionPredictData
from attnkit.tasks.captioning.scenes import HELD_OUT, Scene, Thing, draw_scene
from attnkit.tasks.captioning.scenes_data import ScenesData
from attnkit.tasks.captioning.sets import CaptionSet
from attnkit.tasks.captioning.tokenizer import (
    BPETokenizer,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
    words_of,
)
from attnkit.tasks.captioning.word_maps import WordMaps

__all__ = [
    "EVERYTHING",
    "HELD_OUT",
    "BPETokenizer",
    "CaptionCsvData",
    "CaptionDataModule",
    "CaptionFilesData",
    "CaptionPredictData",
    "CaptionSet",
    "CocoCaptionsData",
    "ImageCaptioning",
    "KarpathyData",
    "Look",
    "ObjectLooks",
    "Scene",
    "ScenesData",
    "Thing",
    "Tokenizer",
    "WordLooks",
    "WordMaps",
    "WordTokenizer",
    "attribute_of",
    "captions_of",
    "draw_scene",
    "is_right",
    "load_tokenizer",
    "parse_caption",
    "words_of",
    "words_of_objects",
]
