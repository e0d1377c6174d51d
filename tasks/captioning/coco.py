"""Data module of COCO's captions: annotation files and folders of images."""

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
    wordless,
)

_EXPECTED = "COCO's annotations, {images: [{id, file_name}], annotations: [{image_id, caption}]}"


class CocoCaptionsData(CaptionFilesData):
    """COCO's `captions_train2017.json` and `train2017/`, or other data in that form.

    A file is `{"images": [{"id", "file_name"}, …], "annotations": [{"image_id", "caption"}, …]}`;
    other keys are not read. A split whose file is not given is taken from train.

    Source: Chen et al., Microsoft COCO Captions, 2015. The captions of its test images are not
    published, so papers test on a part of the validation images (see `KarpathyData`).

    Args:
        annotations: the JSON file of the training images.
        images: the folder of the training images, which each `file_name` is relative to.
        val_annotations: the JSON file of the validation images.
        val_images: the folder of the validation images; None: `images`.
        test_annotations: the JSON file of the test images.
        test_images: the folder of the test images; None: `images`.
        **options: the arguments of `CaptionFilesData` and `CaptionDataModule`.

    Raises:
        ValueError, UserError: as `CaptionFilesData`.
    """

    def __init__(
        self,
        annotations: str | Path,
        images: str | Path,
        *,
        val_annotations: str | Path | None = None,
        val_images: str | Path | None = None,
        test_annotations: str | Path | None = None,
        test_images: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.files: dict[str, tuple[Path, Path]] = {}
        for split, prefix, file, folder in (
            ("train", "", annotations, images),
            ("val", "val_", val_annotations, val_images),
            ("test", "test_", test_annotations, test_images),
        ):
            if file is not None or split == "train":
                self.files[split] = (
                    existing(f"{prefix}annotations", file, folder=False),
                    existing(f"{prefix}images", images if folder is None else folder, folder=True),
                )
            elif folder is not None:
                raise ValueError(f"{prefix}images: needs {prefix}annotations, which is not given")

    def entries(self) -> Entries:
        found = Entries()
        for split, (file, folder) in self.files.items():
            _read(found, split, file, folder)
        return found


def _read(found: Entries, split: str, file: Path, folder: Path) -> None:
    plain = read_json(file, _EXPECTED)
    entries: dict[Any, Entry] = {}
    for number, image in enumerate(items_of(plain, "images", str(file))):
        with found.noting():
            where = f"{file}, images[{number}]"
            key = value_of(image, "id", (int, str), where)
            name = value_of(image, "file_name", str, where)
            if key in entries:
                raise UserError(f"data: {where}: the id {key} is also the id of another image")
            entries[key] = Entry(str(folder / name), [], str(key), where)
    for number, annotation in enumerate(items_of(plain, "annotations", str(file))):
        with found.noting():
            where = f"{file}, annotations[{number}]"
            key = value_of(annotation, "image_id", (int, str), where)
            if key not in entries:
                raise UserError(f"data: {where}: no image has the id {key}")
            caption = value_of(annotation, "caption", str, where)
            if problem := wordless(caption):
                raise UserError(f"data: {where}: {problem} of image {key}")
            entries[key].captions.append(caption)
    for entry in entries.values():
        found.add(split, entry)
