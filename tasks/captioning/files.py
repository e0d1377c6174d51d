"""Common parts of data modules of captioned image files: entries, problems, reading JSON."""

import json
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnkit.core.arguments import at_least
from attnkit.lightning.errors import UserError
from attnkit.tasks.captioning.data import CaptionDataModule
from attnkit.tasks.captioning.sets import CaptionSet
from attnkit.tasks.images.data import with_train
from attnkit.tasks.images.folder import MAX_NAMED, Files, say_once, shortened
from attnkit.tasks.images.native import KeepsSizes
from attnkit.tasks.tokens import EpochTokenSampler


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
