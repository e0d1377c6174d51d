"""Captioned image files: the part that all formats share."""

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
    """One image of a list: its file, captions and name, and its place in the list."""

    path: str
    captions: list[str]
    id: str
    where: str


@dataclass
class Entries:
    """What a reader found: entries by split, and problems, a line each, in the order of the file.

    A few of them may be broken rows of a table, one or 1 %, as a few files of train may be: public
    tables have such rows.
    """

    splits: dict[str, list[Entry]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    rows: int = 0

    @contextmanager
    def noting(self) -> Iterator[None]:
        """What is wrong with an item is noted as a problem, and the item left out."""
        try:
            yield
        except UserError as error:
            self.problems.append(str(error).removeprefix("data: "))

    def add(self, split: str, entry: Entry) -> None:
        """Add an entry. A missing file and a caption that is missing or has no words are noted as
        problems."""
        captions = [caption for caption in entry.captions if not wordless(caption)]
        if not (there := os.path.isfile(entry.path)):
            self.problems.append(f"{entry.where}: no such image: {entry.path}")
        if len(captions) < len(entry.captions):
            said = next(filter(None, map(wordless, entry.captions)))
            self.problems.append(f"{entry.where}: {said} of {entry.id}")
        elif not captions:
            self.problems.append(f"{entry.where}: no caption of {entry.id}")
        if there and captions:
            self.splits.setdefault(split, []).append(replace(entry, captions=captions))


class CaptionFilesData(KeepsSizes, CaptionDataModule):
    """Image files with captions from a list, which a subclass reads in `entries()`.

    Images may have any size and mode: the centre square is used, resized to `image_size` (default:
    the median short side of the training images, at most 224). Pixels stay in memory if all splits
    fit in `memory_gb`, as in `ImageFolderData`; else files are decoded in `num_workers` processes
    whenever a batch needs them. Nothing is written beside the images.

    Batches of val and test have, besides what `CaptionDataModule` says, `path` and `id`, lists of
    str: the file, and its name in the list.

    Args:
        skip_corrupt: leave out what is wrong: rows or items of the list that cannot be read, images
            that are missing or cannot be decoded, and captions that are empty or have no words; the
            first of them are named, with their line or place. Else each is an error, but for a few,
            which are named all the same: rows with too few or too many columns, if they are one or
            at most 1 % of a table, and files that cannot be decoded, if they are at most 1 % of
            train.
        memory_gb: gigabytes (10⁹ bytes) of pixels that this process may hold; None: half of what is
            available, shared between the processes of this machine.
        native: images keep their size and proportion, and `image` of a batch is a list of them, for
            a `ViTEncoder`, whose `image_size` is then only that whose positions are learned.
        max_tokens, max_image_tokens, patch_size: with `native`, as of `ImageFolderData`.
        **options: the arguments of `CaptionDataModule`.

    Raises:
        ValueError: a file or folder that is named is not there, or an argument is out of range.
        UserError: in `setup`, if the list or its files are not as described.
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
        """What the list holds, by split."""

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
        """Print what may be left out, else raise the first problem."""
        few = len(found.broken) <= max(1, found.rows // 100)
        problems = [line for line in found.problems if not few or line not in found.broken]
        if problems and not self.skip_corrupt:
            more = f"\nand {len(problems) - 1} more; " if len(problems) > 1 else "\n"
            raise UserError(f"data: {problems[0]}{more}data.skip_corrupt=true leaves them out")
        for line in shortened(found.problems, MAX_NAMED):
            say_once(f"left out: {line.splitlines()[0]}")


def wordless(caption: str) -> str:
    """What is wrong with a caption that has no word: no letter or digit. Nothing, if it has one.

    The metrics read words only (`words_of`), so that all others have a score of 0.
    """
    if any(map(str.isalnum, caption)):
        return ""
    said = caption.strip()
    return f"a caption without words ({said!r:.40})" if said else "an empty caption"


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        UserError: the file is not JSON, or holds no object. It names the file and the line.
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
    """`found[key]`, which must be a list."""
    items = _object(found, where).get(key)
    if not isinstance(items, list):
        raise UserError(f"data: {where}: expected a list {key!r}, got {_shown(items)}")
    return items


def value_of(item: Any, key: str, kinds: Any, where: str) -> Any:
    """`item[key]`, which must be text (`str`) or a number or text (`(int, str)`)."""
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
