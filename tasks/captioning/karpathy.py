"""Data module of Karpathy's splits: one JSON file with the captions and split of every image."""

from pathlib import Path
from typing import Any

from attnkit.core.arguments import existing
from attnkit.lightning.errors import UserError
from attnkit.tasks.captioning.files import (
    CaptionFilesData,
    Entries,
    Entry,
    items_of,
    read_json,
    value_of,
)

_EXPECTED = "Karpathy's form, {images: [{filename, split, sentences: [{raw}]}]}"
# "restval" holds the validation images of COCO that are in neither val nor test: the papers
# train on it.
_SPLITS = {"train": "train", "restval": "train", "val": "val", "test": "test"}


class KarpathyData(CaptionFilesData):
    """`dataset_flickr8k.json`, `dataset_flickr30k.json`, `dataset_coco.json` and their images.

    An image is `{"filename", "split", "sentences": [{"raw"}, …]}`, and for COCO also has
    `filepath`, the folder inside `images`. The split is train, restval (which is added to train),
    val or test. A sentence without `raw` is joined from its `tokens`.

    Source: Karpathy and Fei-Fei, Deep Visual-Semantic Alignments, 2015. The papers keep the words
    that occur five times in the training captions, which is the default of `min_count`.

    Args:
        annotations: the JSON file.
        images: the folder of the image files.
        **options: the arguments of `CaptionFilesData` and `CaptionDataModule`.

    Raises:
        ValueError, UserError: as `CaptionFilesData`; an unknown split is named.
    """

    def __init__(self, annotations: str | Path, images: str | Path, **options: Any) -> None:
        super().__init__(**options)
        self.file = existing("annotations", annotations, folder=False)
        self.folder = existing("images", images, folder=True)

    def entries(self) -> Entries:
        found = Entries()
        plain = read_json(self.file, _EXPECTED)
        for number, image in enumerate(items_of(plain, "images", str(self.file))):
            with found.noting():
                where = f"{self.file}, images[{number}]"
                name = value_of(image, "filename", str, where)
                split = value_of(image, "split", str, where)
                if split not in _SPLITS:
                    raise UserError(
                        f"data: {where} ({name}): expected a split of {', '.join(_SPLITS)}, "
                        f"got {split!r}"
                    )
                path = self.folder / str(image.get("filepath") or "") / name
                captions = []
                for place, sentence in enumerate(items_of(image, "sentences", where)):
                    with found.noting():
                        captions.append(_text(sentence, f"{where}, sentences[{place}]"))
                found.add(_SPLITS[split], Entry(str(path), captions, name, where))
        return found


def _text(sentence: Any, where: str) -> str:
    if isinstance(sentence, dict) and "raw" not in sentence:
        tokens = sentence.get("tokens")
        if isinstance(tokens, list):
            return " ".join(map(str, tokens))
    return value_of(sentence, "raw", str, where)
