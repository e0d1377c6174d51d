"""Lists of image files: folders of splits and classes, and CSV tables."""

import csv
import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from PIL import Image

from attnkit.lightning.console import say as print_line
from attnkit.lightning.errors import UserError
from attnkit.tasks.images.decode import header_size

# The spellings of Hugging Face's data sets, in any case.
SPELLINGS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SPLIT_OF = {spelling: split for split, spellings in SPELLINGS.items() for spelling in spellings}
# Formats that Pillow only identifies, or reads with external programs.
_UNREAD = frozenset(("BUFR", "EPS", "FPX", "GRIB", "HDF5", "MIC", "MPEG", "WMF"))
MAX_NAMED = 10


@dataclass
class Files:
    """The image files of one split: paths and class numbers."""

    paths: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    @property
    def label_of(self) -> dict[str, int]:
        return dict(zip(self.paths, self.labels, strict=True))


def find_splits(
    root: str | Path, known: Sequence[str] | None = None
) -> tuple[dict[str, Files], list[str]]:
    """Return the splits under `root` and the class names, sorted as in torchvision's ImageFolder.

    `root` holds `train/` and, if given, `val/` and `test/` (or another usual spelling, in any
    case), each with one folder per class; or it holds the class folders itself, which are then all
    "train". Folders and files that are not used are printed.

    Args:
        root: the folder.
        known: the classes of the module to be tested: then only `test/` is read, if it exists, and
            train and some classes may be missing.

    Raises:
        UserError: no images, fewer than two classes, an empty class folder in train, classes in val
            or test that train (or the module) lacks, or names that may be splits or classes; the
            error names the folder.
    """
    root = Path(root)
    folders = _split_folders(root, needs_train=known is None)
    if known is not None and "test" in folders:
        folders = {"test": folders["test"]}
    class_names = list(known or _subfolders(folders["train"]))
    if len(class_names) < 2:
        found = f"only {class_names[0]!r}" if class_names else "none"
        raise UserError(
            f"data.root: {folders['train']} must hold one folder per class, at least two; "
            f"found {found}"
        )
    splits: dict[str, Files] = {}
    skipped: list[str]
    for split, folder in folders.items():
        _check_classes(folder, class_names, "train" if known is None else "the module")
        files, skipped = Files(), []
        skipped += [entry.path for entry in os.scandir(folder) if not entry.is_dir()]
        for label, name in enumerate(class_names):
            paths = list_images(folder / name, skipped) if (folder / name).is_dir() else []
            files.paths += paths
            files.labels += [label] * len(paths)
        splits[split] = files
        say_skipped(folder, skipped)
        _check_counts(split, folder, files, class_names, all_needed=known is None)
    return splits, class_names


def list_images(folder: str | Path, skipped: list[str]) -> list[str]:
    """Return all files below a folder that Pillow can read, sorted.

    Files are recognised by their suffix, or without one by their header. Hidden folders are left
    out; files that are left out are added to `skipped`.

    Raises:
        UserError: a folder cannot be read.
    """
    paths: list[str] = []
    for directory, names, files in os.walk(folder, onerror=_raise_unreadable, followlinks=True):
        names[:] = sorted(name for name in names if not _hidden(name))
        for name in sorted(files):
            path = os.path.join(directory, name)
            suffix = os.path.splitext(name)[1].lower()
            is_image = suffix in suffixes() if suffix else header_size(path) is not None
            (paths if is_image and not _hidden(name) else skipped).append(path)
    return paths


@functools.cache
def suffixes() -> frozenset[str]:
    """Return the suffixes of images that Pillow reads."""
    known = Image.registered_extensions()
    readable = set(Image.OPEN) - _UNREAD
    return frozenset((*(suffix for suffix, kind in known.items() if kind in readable), ".jfif"))


def say_skipped(root: str | Path, skipped: Sequence[str]) -> None:
    """Print which files below a folder are not read, by suffix, except files of file managers."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for path in skipped:
        name = os.path.basename(path)
        suffix = os.path.splitext(name)[1].lower()
        if not _hidden(name):
            kinds[suffix if suffix not in suffixes() else "outside a class"].append(path)
        elif suffix in suffixes() and not name.startswith("._"):
            kinds["hidden"].append(path)
    if kinds:
        named = ", ".join(
            f"{len(paths)} × {kind or 'no suffix'} ({os.path.relpath(paths[0], root)}"
            f"{', …' if len(paths) > 1 else ''})"
            for kind, paths in sorted(kinds.items())
        )
        count = sum(map(len, kinds.values()))
        say_once(f"{root}: {count} {'file is' if count == 1 else 'files are'} not read: {named}")


def _raise_unreadable(error: OSError) -> None:
    raise UserError(f"data: {error.filename} cannot be read: {error.strerror}") from error


def report_failures(
    failures: Mapping[str, str], split: str, total: int, *, given: bool, skip_corrupt: bool
) -> None:
    """Print the files that cannot be decoded; raise UserError if there are too many.

    Args:
        failures: maps a path to the reason.
        split: the name of the split, for the message.
        total: number of files of the split.
        given: whether the user gave this val or test split: then no file may be broken.
        skip_corrupt: never raise.

    Raises:
        UserError: more than 1 % of the files, or any in a given val or test folder.
    """
    if not failures:
        return
    named = [f"{path} ({reason})" for path, reason in failures.items()]
    if skip_corrupt or not (given or len(failures) > 0.01 * total):
        say_once(f"{split}: {len(failures)} of {total} files cannot be decoded and are left out:")
        for line in shortened(named, MAX_NAMED):
            say_once(f"  {line}")
        return
    limit = f"none may be in a given {split} folder" if given else "more than 1 %"
    raise UserError(
        f"{split}: {len(failures)} of {total} files cannot be decoded ({limit})\n"
        f"{'; '.join(shortened(named, 3))}\n"
        "data.skip_corrupt=true leaves them out"
    )


def say(line: str) -> None:
    """Print a line to stderr and run.log."""
    print_line(line, error=True)


say_once = rank_zero_only(say)  # for messages about files that all processes read


def _split_folders(root: Path, needs_train: bool) -> dict[str, Path]:
    folders = _subfolders(root)
    found: dict[str, Path] = {}
    for name in folders:
        split = SPLIT_OF.get(name.lower())
        if split in found:
            raise UserError(
                f"data.root: {root} holds both {found[split].name} and {name}; keep one of them as "
                f"{split}, or give it another name: {', '.join(SPELLINGS)}"
            )
        if split is not None:
            found[split] = root / name
    # A class may also be called "train": a split holds class folders, a class holds images.
    layout = {
        split: found[split] for split in SPELLINGS if split in found and _subfolders(found[split])
    }
    others = [name for name in folders if root / name not in found.values()]
    if "train" in layout or (layout and not needs_train):
        flat = [path for split, path in found.items() if split not in layout]
        if flat:
            raise UserError(f"data.root: {flat[0]} must hold one folder per class; found none")
        renamed = [
            f"{path.name}/ as {split}" for split, path in layout.items() if path.name != split
        ]
        if renamed:
            say_once(f"{root}: {', '.join(renamed)}")
        if others:
            say_once(f"{root}: not used, as no splits: {', '.join(shortened(others, MAX_NAMED))}")
        return layout
    if layout or (found and not others):
        raise UserError(
            f"data.root: {root} holds {', '.join(sorted(p.name for p in found.values()))} "
            "but no train/ with one folder per class"
        )
    words = {
        name: [SPLIT_OF[w] for w in re.findall("[a-z]+", name.lower()) if w in SPLIT_OF]
        for name in others
    }
    like = [name for name, splits in words.items() if splits and _subfolders(root / name)]
    if len({split for name in like for split in words[name]}) > 1:
        raise UserError(
            f"data.root: {' and '.join(shortened(like, 3))} in {root} may be splits or classes\n"
            f"  splits are called {', '.join(SPELLINGS)}; classes hold images, not folders"
        )
    inside = {sub for name in folders for sub in _subfolders(root / name)}
    if len({SPLIT_OF[sub.lower()] for sub in inside if sub.lower() in SPLIT_OF}) > 1:
        say_once(
            f"{root}: the splits inside of the class folders are read together; as train/<class> "
            "and test/<class> they are kept apart"
        )
    return {"train": root}


def _check_classes(folder: Path, class_names: Sequence[str], whose: str) -> None:
    names = set(_subfolders(folder))
    extra, missing = sorted(names - set(class_names)), sorted(set(class_names) - names)
    if names and not extra:
        return
    lines = [f"data.root: the class folders of {folder} differ from {whose}'s"]
    lines.append(f"not in {whose}: {', '.join(shortened(extra, 5))}" if extra else "there are none")
    if missing:
        lines.append(f"missing: {', '.join(shortened(missing, 5))}")
    raise UserError("\n".join(lines))


def _check_counts(
    split: str, folder: Path, files: Files, class_names: Sequence[str], *, all_needed: bool
) -> None:
    if not files.paths:
        raise UserError(f"data.root: no images under {folder} that Pillow reads")
    there = set(files.labels)
    empty = [name for label, name in enumerate(class_names) if label not in there]
    named = ", ".join(shortened(empty, 5))
    if empty and split == "train" and all_needed:
        raise UserError(f"data.root: class folders without images in {folder}: {named}")
    if empty:
        say_once(f"{split}: no images of {named}")


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not _hidden(entry.name))


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def shortened(items: Sequence[str], count: int) -> list[str]:
    return [*items[:count], *([f"… and {len(items) - count} more"] if len(items) > count else [])]


class Table:
    """A text file in UTF-8 with a header and a row per line.

    A row is one line: quotes that do not end in their line are a problem of that line, and the next
    line is read as usual. Spaces around names in the header do not count.

    Args:
        path: the file.
        delimiter: character between columns; None: comma, semicolon or tab, whichever is most
            frequent in the header.

    Raises:
        ValueError: the delimiter has more than one character.
        UserError: on reading, if the file is not a CSV file in UTF-8.
    """

    def __init__(self, path: Path, delimiter: str | None = None) -> None:
        if delimiter is not None and len(delimiter) != 1:
            raise ValueError(f"delimiter: expected one character, got {delimiter!r}")
        self.path = path
        self._delimiter = delimiter

    @cached_property
    def _first(self) -> tuple[str, str]:
        return next(self._lines(), (f"{self.path}, line 1", ""))

    @property
    def delimiter(self) -> str:
        """The character between columns."""
        return self._delimiter or max(",;\t", key=self._first[1].count)

    @cached_property
    def header(self) -> list[str]:
        """The names of the columns, as written in the file."""
        return self.fields(*self._first)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Return pairs of the place and the text of every line below the header."""
        lines = self._lines()
        next(lines, None)
        return lines

    def _lines(self) -> Iterator[tuple[str, str]]:
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as file:
                for number, line in enumerate(file, 1):
                    yield f"{self.path}, line {number}", line
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"data: {self.path} is not a CSV file in UTF-8: {error}") from error

    def fields(self, where: str, line: str) -> list[str]:
        """Return the fields of a line, [] for an empty line.

        Raises:
            UserError: a quote does not end in the line.
        """
        try:
            return next(csv.reader([line], delimiter=self.delimiter, strict=True), [])
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise UserError(
                    f"data: {where}: a quote opens that does not close in this line; a row is one "
                    'line, and a " in a quoted value is written ""'
                ) from error
        try:  # text after a closing quote belongs to the field
            return next(csv.reader([line], delimiter=self.delimiter), [])
        except csv.Error as error:
            raise UserError(f"data: {where}: {error}") from error

    def wrong_count(self, where: str, fields: Sequence[str]) -> str:
        """Return the problem of a row with more or fewer columns than the header, or ""."""
        if len(fields) == len(self.header):
            return ""
        advice = "a row is one line"  # the line may be the rest of a quoted value
        if len(fields) > len(self.header):
            advice = f"a value that holds {self.delimiter!r} belongs in quotes"
        return f"{where}: expected {len(self.header)} columns, got {len(fields)}; {advice}"

    def place(self, name: str) -> int:
        """Return the index of the column with this name, with or without spaces around it.

        Raises:
            UserError: no column has the name, or several have.
        """
        stripped = [column.strip() for column in self.header]
        for names, wanted in ((self.header, name), (stripped, name.strip())):
            if names.count(wanted) == 1:
                return names.index(wanted)
        problem = "several columns" if stripped.count(name.strip()) > 1 else "no column"
        raise UserError(
            f"data: {self.path} has {problem} {name!r}, "
            f"only {', '.join(stripped) or 'an empty header'}"
        )

    def guessed(self, names: Sequence[str]) -> int | None:
        """Return the index of the column with the first of these names, in any case, or None."""
        there = [column.strip().lower() for column in self.header]
        return next((there.index(name) for name in names if name in there), None)


def split_in(given: str, where: str) -> str:
    """Return the split that a cell names in one of the usual spellings.

    Raises:
        UserError: the cell names no split.
    """
    split = SPLIT_OF.get(given.strip().lower())
    if split is None:
        raise UserError(
            f"data: {where}: expected a split train, val or test, got {given.strip()!r}"
        )
    return split
