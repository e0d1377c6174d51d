"""Captioned image files, listed in a CSV table, in COCO's or in Karpathy's form."""

import json
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnkit.core.arguments import at_least, existing
from attnkit.lightning.errors import UserError
from attnkit.tasks.captioning.data import CaptionDataModule, CaptionSet
from attnkit.tasks.images.data import with_train
from attnkit.tasks.images.files import MAX_NAMED, Files, Table, say_once, shortened, split_in
from attnkit.tasks.images.native import KeepsSizes
from attnkit.tasks.loaders import EpochTokenSampler


@dataclass
class Entry:
    """An image of a list: its file, captions and name, and its place in the list."""

    path: str
    captions: list[str]
    id: str
    where: str


@dataclass
class Entries:
    """The entries that a reader found, by split, and the problems, a line each, in file order.

    `broken` holds the problems that are rows with a wrong number of columns. One such row, or 1 %
    of the table, is tolerated, because public tables have such rows.
    """

    splits: dict[str, list[Entry]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    rows: int = 0

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record a `UserError` raised in this block as a problem, and go on without the item."""
        try:
            yield
        except UserError as error:
            self.problems.append(str(error).removeprefix("data: "))

    def add(self, split: str, entry: Entry) -> None:
        """Add an entry; record a missing file and a missing or wordless caption as problems."""
        captions = [caption for caption in entry.captions if not wordless(caption)]
        if not (there := os.path.isfile(entry.path)):
            self.problems.append(f"{entry.where}: no such image: {entry.path}")
        if len(captions) < len(entry.captions):
            problem = next(filter(None, map(wordless, entry.captions)))
            self.problems.append(f"{entry.where}: {problem} of {entry.id}")
        elif not captions:
            self.problems.append(f"{entry.where}: no caption of {entry.id}")
        if there and captions:
            self.splits.setdefault(split, []).append(replace(entry, captions=captions))


class CaptionFilesData(KeepsSizes, CaptionDataModule):
    """Image files with captions from a list, which a subclass reads in `entries()`.

    Images may have any size and mode: the centre square is used, resized to `image_size` (default:
    the median short side of the training images, at most 224). Pixels stay in memory if all splits
    fit in `memory_gb`, as in `ImageFolderData`; otherwise files are decoded in `num_workers`
    processes whenever a batch needs them. Nothing is written beside the images.

    Batches of val and test also have `path` and `id`, lists of str: the file, and its name in the
    list.

    Args:
        skip_corrupt: leave out rows or items of the list that cannot be read, images that are
            missing or cannot be decoded, and captions that are empty or have no words; the first of
            them are printed with their place. Otherwise each is an error, with two exceptions that
            are printed and left out: rows with too few or too many columns, if they are one or at
            most 1 % of a table, and files that cannot be decoded, if they are at most 1 % of train.
        memory_gb: gigabytes (10⁹ bytes) of pixels that this process may hold; None: half of what is
            available, shared between the processes of this machine.
        native: images keep their size and aspect ratio, and `image` of a batch is a list of them,
            for a `ViTEncoder`; its `image_size` is then only the size whose positions are learned.
        max_tokens, max_image_tokens, patch_size: with `native`, as in `ImageFolderData`.
        **options: the arguments of `CaptionDataModule`.

    Raises:
        ValueError: a given file or folder does not exist, or an argument is out of range.
        UserError: in `setup`, if the list or its files cannot be read, or no image has a caption.
    """

    def __init__(
        self,
        *,
        skip_corrupt: bool = False,
        memory_gb: float | None = None,
        native: bool = False,
        max_tokens: int | None = None,
        max_image_tokens: int | None = None,
        patch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        at_least(0, memory_gb=memory_gb)
        tokens = max_tokens, max_image_tokens, patch_size
        self.set_native(native, *tokens, shuffled=EpochTokenSampler)
        self.skip_corrupt = skip_corrupt
        self.memory_gb = memory_gb

    @abstractmethod
    def entries(self) -> Entries:
        """Read the list and return its entries by split."""

    def load(self) -> Mapping[str, CaptionSet]:
        found = self.entries()
        self._report(found)
        if not found.splits:
            raise UserError("data: the list has no image with a caption")
        splits = found.splits if self.testing else with_train(found.splits)
        files = {
            split: Files([entry.path for entry in entries], [0] * len(entries))
            for split, entries in splits.items()
        }
        sets = {}
        for split, (images, good) in self.read(files, 3).items():
            others = {"id": [entry.id for entry in splits[split]], "path": files[split].paths}
            captions = [entry.captions for entry in splits[split]]
            sets[split] = CaptionSet(images, captions, others).select(good)
        return sets

    def _report(self, found: Entries) -> None:
        """Print the problems that may be left out; raise the first one otherwise."""
        few = len(found.broken) <= max(1, found.rows // 100)
        problems = [line for line in found.problems if not few or line not in found.broken]
        if problems and not self.skip_corrupt:
            more = f"\nand {len(problems) - 1} more; " if len(problems) > 1 else "\n"
            raise UserError(f"data: {problems[0]}{more}data.skip_corrupt=true leaves them out")
        for line in shortened(found.problems, MAX_NAMED):
            say_once(f"left out: {line.splitlines()[0]}")


def wordless(caption: str) -> str:
    """Return the problem of a caption without a letter or digit; "" if it has one.

    The metrics read words only (`words_of`): a caption without words always has a score of 0.
    """
    if any(map(str.isalnum, caption)):
        return ""
    text = caption.strip()
    return f"a caption without words ({text!r:.40})" if text else "an empty caption"


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON file and return its object.

    Raises:
        UserError: the file is not JSON, or holds no object. The error names the file and the line.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(
            f"data: {path} is not JSON: {error.msg} (line {error.lineno}, column {error.colno})\n"
            f"expected {what}"
        ) from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"data: {path} cannot be read: {error}\nexpected {what}") from error
    if not isinstance(found, dict):
        raise UserError(f"data: {path} holds a {type(found).__name__}\nexpected {what}")
    return found


def items_of(found: Any, key: str, where: str) -> list[Any]:
    """Return `found[key]`; raise UserError unless it is a list."""
    items = _object(found, where).get(key)
    if not isinstance(items, list):
        raise UserError(f"data: {where}: expected a list {key!r}, got {_shown(items)}")
    return items


def value_of(item: Any, key: str, kinds: Any, where: str) -> Any:
    """Return `item[key]`; raise UserError unless it is of `kinds`: `str` or `(int, str)`."""
    value = _object(item, where).get(key)
    if not isinstance(value, kinds) or isinstance(value, bool):
        expected = "text" if kinds is str else "a number or text"
        raise UserError(f"data: {where}: expected {key!r}, {expected}, got {_shown(value)}")
    return value


def _object(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise UserError(f"data: {where}: expected an object, got {_shown(item)}")
    return item


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value!r:.60}"


class CaptionCsvData(CaptionFilesData):
    """A CSV file with a header and a row per caption: `image,caption`.

    An image with several captions has several rows. Other columns are not read. A caption that
    holds commas stands in quotes, as CSV writers put it. A row is one line: quotes that do not end
    in their line are reported as a problem of that line, and the next line is read as usual.

    Args:
        table: the CSV file, in UTF-8.
        images: the folder that the paths of images are relative to; None: the folder of the table.
        image_column: name of the column of paths; spaces around names in the header do not count.
        caption_column: name of the column of captions.
        split_column: name of a column that holds train, val or test (or another usual spelling),
            the same for all rows of an image; None: val and test are taken from train.
        delimiter: the character between two columns.
        **options: the arguments of `CaptionFilesData` and `CaptionDataModule`.

    Raises:
        ValueError, UserError: as `CaptionFilesData`; an unknown split is named.
    """

    def __init__(
        self,
        table: str | Path,
        images: str | Path | None = None,
        *,
        image_column: str = "image",
        caption_column: str = "caption",
        split_column: str | None = None,
        delimiter: str = ",",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        file = existing("table", table, folder=False)
        self.table = Table(file, delimiter)
        self.folder = file.parent if images is None else existing("images", images, folder=True)
        self.image_column = image_column
        self.caption_column = caption_column
        self.split_column = split_column

    def entries(self) -> Entries:
        found = Entries()
        entries: dict[str, Entry] = {}
        splits: dict[str, str] = {}
        table = self.table
        at = [table.place(name) for name in (self.image_column, self.caption_column)]
        split_at = None if self.split_column is None else table.place(self.split_column)
        for where, line in table.rows():
            with found.noting():
                row = table.fields(where, line)
                found.rows += 1
                if wrong := table.wrong_count(where, row):
                    if row:
                        found.broken.add(wrong)
                        found.problems.append(wrong)
                    continue
                name, caption = row[at[0]].strip(), row[at[1]]
                if not name:
                    raise UserError(f"data: {where}: no {self.image_column}")
                split = "train" if split_at is None else split_in(row[split_at], where)
                if splits.setdefault(name, split) != split:
                    raise UserError(
                        f"data: {where}: {name} is in {split} here, but was in {splits[name]} "
                        "before"
                    )
                entry = entries.setdefault(name, Entry(str(self.folder / name), [], name, where))
                entry.captions.append(caption)
                if wordless(caption):
                    entry.where = where  # the row that the error names
        for name, entry in entries.items():
            found.add(splits[name], entry)
        return found


_COCO = "COCO's annotations, {images: [{id, file_name}], annotations: [{image_id, caption}]}"


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
    plain = read_json(file, _COCO)
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


_KARPATHY = "Karpathy's form, {images: [{filename, split, sentences: [{raw}]}]}"
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
        plain = read_json(self.file, _KARPATHY)
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
