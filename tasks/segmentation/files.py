"""Pictures and masks in folders, in the usual forms of masks."""

import csv
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageColor
from torch import Tensor

from attnkit.core.arguments import existing
from attnkit.lightning.errors import RunError, UserError
from attnkit.tasks.images.decode import (
    UndecodableImageError,
    as_tensor,
    header_size,
    keys_of,
    read_picture,
    to_channels,
)
from attnkit.tasks.images.files import SPLIT_OF, list_images, say_once, say_skipped, shortened
from attnkit.tasks.loaders import module_of
from attnkit.tasks.segmentation.data import IGNORED, MaskedImages, SegmentationDataModule

_FEW = 3
_CLOSE = 10  # numbers up to this are classes even if most of them do not occur


class Classes(NamedTuple):
    """Maps values of a mask to classes.

    names: the names of the classes, in the order of their numbers.
    number_of: maps a value to the number of its class, or to 255 if its pixels do not count. A
        value is a number, or with `in_colours` 65536 · red + 256 · green + blue.
    """

    names: list[str]
    number_of: dict[int, int]
    in_colours: bool


def read_table(path: Path) -> tuple[list[tuple[str, int]], bool]:
    """Read names and values of classes, and whether the values are colours.

    Raises:
        UserError: the table does not have this form; the error names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"data.classes: {path} is not UTF-8; save it as UTF-8") from error
    if path.suffix == ".txt":
        lines = enumerate(text.splitlines())
        return [(name.strip(), n) for n, name in lines if name.strip()], False
    reader = csv.DictReader(StringIO(text), skipinitialspace=True)
    columns = {name.strip().lower(): name for name in reader.fieldnames or ()}
    in_colours = {"r", "g", "b"} <= columns.keys() or "color" in columns
    rows: list[tuple[str, int]] = []
    name_of: dict[int, str] = {}
    for number, row in enumerate(reader):
        where = f"data.classes: {path}, line {reader.line_num}"
        try:
            cells = {name: (row[column] or "").strip() for name, column in columns.items()}
            channels = [0]
            if "color" in columns:
                channels = list(ImageColor.getrgb(cells["color"])[:3])
            elif in_colours:
                channels = [int(cells[channel]) for channel in "rgb"]
            name = cells["name"]
            value = number if in_colours else int(cells.get("value", number))
        except (KeyError, ValueError) as error:
            raise UserError(
                f"{where}: expected the columns name, and r, g, b or color or value, got "
                f"{','.join(map(str, row.values()))}"
            ) from error
        if not 0 <= min(channels) <= max(channels) <= 255:
            raise UserError(f"{where}: expected channels from 0 to 255, got {channels}")
        value = packed(*channels) if in_colours else value
        if name_of.setdefault(value, name) != name:
            raise UserError(f"{where}: {name!r} has the same mask values as {name_of[value]!r}")
        rows.append((name, value))
    return rows, in_colours


def chosen_classes(
    rows: list[tuple[str, int]] | None,
    in_colours: bool,
    values: set[int],
    ignored: Sequence[int | str],
    known: Sequence[str] | None = None,
) -> Classes:
    """Return the classes of a table, or without a table those of the values in masks.

    Args:
        rows: names and values of the table; None: there is no table.
        in_colours: whether the values are colours.
        values: values in the masks of train, or in all masks if classes are `known`.
        ignored: names and numbers whose pixels do not count.
        known: classes of the module to be tested, if there is no table.

    Raises:
        UserError: fewer than 2 or more than 255 classes are left; there is no table, and masks hold
            colours or numbers far apart; or `ignored` holds neither a class nor a number.
    """
    out = {str(item) for item in ignored}
    is_binary = rows is None and (
        values == {0, IGNORED}
        if known is None
        else len(known) == 2 and {IGNORED} <= values <= {0, IGNORED}
    )
    if rows is None:
        rows = _without_table(values, out, known, is_binary)
    names = [*dict.fromkeys(name for name, _ in rows)]
    for item in sorted(out.difference(names)):
        if in_colours or not item.isdecimal():
            expected = "a class" if in_colours else "a class or a number"
            raise UserError(
                f"data.ignored: expected {expected}, got {item!r}; the classes are "
                f"{', '.join(shortened(names, 8))}"
            )
    kept = [(n, v) for n, v in rows if n not in out and (in_colours or str(v) not in out)]
    number_of_name = {n: at for at, n in enumerate(dict.fromkeys(n for n, _ in kept))}
    if not 2 <= len(number_of_name) <= IGNORED:
        raise UserError(
            f"data: expected 2 to {IGNORED} classes of pixels, got {len(number_of_name)}"
        )
    number_of = {} if in_colours or is_binary else {IGNORED: IGNORED}
    number_of |= {int(i): IGNORED for i in out if i.isdecimal()} if not in_colours else {}
    number_of |= {value: IGNORED for _, value in rows}
    number_of |= {value: number_of_name[name] for name, value in kept}
    return Classes([*number_of_name], number_of, in_colours)


def _without_table(
    values: set[int], out: set[str], known: Sequence[str] | None, is_binary: bool
) -> list[tuple[str, int]]:
    """Return names and values of the classes of masks without a table."""
    if is_binary:
        say_once("data: masks of 0 and 255 alone: 255 is a class")
        return list(zip(known or ("0", "1"), (0, IGNORED), strict=True))
    used = sorted(value for value in values if value != IGNORED and str(value) not in out)
    top = max(used, default=0)
    says = "a table says which class they are\n  data.classes=FILE.csv with the columns name, and"
    if top > IGNORED:
        raise UserError(f"data: a mask holds colours or numbers above 255; {says} r, g, b or value")
    if known is not None:  # names are numbers if the training had no table either
        numbers = all(name.isdecimal() for name in known)
        return [(name, int(name) if numbers else at) for at, name in enumerate(known)]
    if top > _CLOSE and 2 * sum(value <= top for value in values) < top + 1:
        seen = ", ".join(shortened([str(value) for value in used], _FEW))
        raise UserError(f"data: masks hold {seen}: {says} value")
    return [(str(number), number) for number in range(top + 1)]


def packed(red: Any, green: Any, blue: Any) -> Any:
    """Return a colour as one number."""
    return red * 65536 + green * 256 + blue


_TABLES = ("classes.csv", "class_dict.csv", "classes.txt")
_MASKS = ("masks", "annotations", "labels")


class Pair(NamedTuple):
    """The paths of a picture and its mask."""

    image: str
    mask: str


class SegmentationFilesData(SegmentationDataModule):
    """Pictures in `root`/images/<split> and masks of the same names in `root`/masks/<split>.

    Splits are named as in `ImageFolderData`; missing ones are taken from train, and without folders
    of splits all pictures are train. The mask of a.jpg is called a.jpg.png, or a with any suffix.
    The folder of masks may also be called annotations or labels. A mask holds the class number of
    each pixel, as a grey value or an index of a palette, or with a table of colours its colour. 255
    does not count, unless masks hold only 0 and 255, which are then two classes.

    The table is `root`/classes.csv (or class_dict.csv). It has a column `name`; for colours also
    `r`, `g`, `b`, or `color` (#ff0000 or red); for numbers that are not 0, 1, 2, … in the order of
    the rows, also `value`. Rows with the same name are one class. Alternatively it is classes.txt,
    with a name in each line. Without a table the classes are 0 to the largest number in train, or
    those of the module to be tested.

    All masks and the headers of pictures are read before training; files are read again whenever a
    batch needs them. `root` is never written to.

    Args:
        root: the folder.
        classes: the table, if it is elsewhere.
        ignored: mask values, or names of classes, whose pixels do not count, in addition to 255.
        in_channels: 1 (grey) or 3 (RGB).
        **options: arguments of `SegmentationDataModule`.

    Raises:
        ValueError: `root` or `classes` does not exist.
        UserError: in `setup`, if a mask is missing, is a JPEG, differs in size from its picture, or
            holds a value of no class; the error names the file.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        classes: str | Path | None = None,
        ignored: Sequence[int | str] = (),
        in_channels: int = 3,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if in_channels not in (1, 3):
            raise ValueError(f"in_channels: expected 1 or 3, got {in_channels}")
        self.root = existing("root", root, folder=True)
        self.classes = None if classes is None else existing("classes", classes, folder=False)
        self.ignored, self.channels = list(ignored), in_channels

    def load(self) -> tuple[Mapping[str, MaskedImages], list[str]]:
        splits = find_pairs(self.root)
        beside = (self.root / name for name in _TABLES)
        table = self.classes or next((path for path in beside if path.is_file()), None)
        rows, in_colours = (None, False) if table is None else read_table(table)
        with ThreadPoolExecutor() as threads:
            found = {
                pair: values
                for pairs in splits.values()
                for pair, values in zip(
                    pairs, threads.map(lambda p: values_of(p, in_colours), pairs), strict=True
                )
            }
        known = module_of(self).hparams.get("class_names") if self.testing and not table else None
        learned = splits.get("train", ()) if known is None else found
        values = {value for pair in learned for value in found[pair]}
        classes = chosen_classes(rows, in_colours, values, self.ignored, known)
        whose = str(table) if table else "train" if known is None else "the module"
        for pair, values in found.items():
            if unknown := [value for value in sorted(values) if value not in classes.number_of]:
                raise UserError(_unknown(pair, unknown[0], classes, whose))
        for split, pairs in splits.items():
            if all(classes.number_of[v] == IGNORED for pair in pairs for v in found[pair]):
                say_once(f"{split}: no pixel counts, as all are 255 or in data.ignored")
        sets = {
            split: MaskedFiles(pairs, classes, self.channels, self.value_range)
            for split, pairs in splits.items()
        }
        return sets, classes.names


class MaskedFiles(MaskedImages):
    """Pictures and masks that are decoded on access.

    Args:
        pairs: the files.
        classes: the classes of the values of masks.
        channels: 1 (grey) or 3.
        value_range: see `Fit`.
    """

    reads_files = True

    def __init__(
        self,
        pairs: Sequence[Pair],
        classes: Classes,
        channels: int,
        value_range: Sequence[float] | None = None,
    ) -> None:
        self.pairs, self.depth, self.value_range = list(pairs), channels, value_range
        known = sorted(classes.number_of.items())
        self.values, self.numbers = np.array(known, dtype=np.int64).T
        self.in_colours = classes.in_colours
        self.rows = torch.arange(len(self.pairs))

    def pair(self, number: int) -> tuple[Tensor, Tensor]:
        image, mask = self.pairs[self.rows[number]]
        try:
            picture = as_tensor(read_picture(image, value_range=self.value_range))
        except UndecodableImageError as error:
            raise RunError(f"{image} cannot be decoded: {error}") from error
        values = read_mask(mask, self.in_colours)
        places = np.searchsorted(self.values, values).clip(max=len(self.values) - 1)
        if (self.values[places] != values).any() or values.shape != picture.shape[1:]:
            raise RunError(f"{mask} or {image} changed while in use")
        classes = torch.from_numpy(self.numbers[places].astype(np.uint8))
        return to_channels(picture, self.depth), classes

    def keys(self) -> Tensor:
        return keys_of(Path(self.pairs[row].image).read_bytes() for row in self.rows.tolist())


def find_pairs(root: Path) -> dict[str, list[Pair]]:
    """Return the pictures of each split with their masks, sorted.

    Raises:
        UserError: a folder of pictures or masks is missing, a split has no pictures, or a picture
            has no mask.
    """
    masks = next((root / name for name in _MASKS if (root / name).is_dir()), root / _MASKS[0])
    for folder in (root / "images", masks):
        if not folder.is_dir():
            raise UserError(
                f"data.root: {root} must hold images/<split> and masks/<split>; no folder {folder}"
            )
    names = sorted(entry.name for entry in os.scandir(root / "images") if entry.is_dir())
    of_split = {SPLIT_OF[name.lower()]: name for name in names if name.lower() in SPLIT_OF}
    if not of_split:
        return {"train": _pairs(root / "images", masks)}
    there = {SPLIT_OF.get(e.name.lower()): e.name for e in os.scandir(masks) if e.is_dir()}
    return {
        split: _pairs(root / "images" / of_split[split], masks / there.get(split, of_split[split]))
        for split in ("train", "val", "test")
        if split in of_split
    }


def _pairs(images: Path, masks: Path) -> list[Pair]:
    skipped: list[str] = []
    pictures = list_images(images, skipped)
    say_skipped(images, skipped)
    files = list_images(masks, []) if masks.is_dir() else []
    mask_of = {os.path.splitext(os.path.relpath(path, masks))[0]: path for path in files}
    mask_for: dict[str, str | None] = {}
    for path in pictures:  # run=predict writes a.jpg.png, so that a.png may lie beside a.jpg
        name = os.path.relpath(path, images)
        mask_for[path] = mask_of.get(name) or mask_of.get(os.path.splitext(name)[0])
    if not pictures:
        raise UserError(f"data.root: no images under {images} that Pillow reads")
    if missing := [path for path, mask in mask_for.items() if mask is None]:
        raise UserError(
            f"data.root: {len(missing)} of {len(pictures)} images have no mask of the same name in "
            f"{masks}\n  {', '.join(shortened(missing, _FEW))}"
        )
    if left := sorted(set(mask_of.values()) - set(mask_for.values())):
        names = ", ".join(shortened(left, _FEW))
        say_once(f"{masks}: {len(left)} masks of no image are not used: {names}")
    return [Pair(path, mask) for path, mask in mask_for.items() if mask is not None]


def values_of(pair: Pair, in_colours: bool) -> set[int]:
    """Return the values of a mask.

    Raises:
        UserError: a file cannot be read, or the sizes of picture and mask differ.
    """
    values = read_mask(pair.mask, in_colours)
    size, (height, width) = header_size(pair.image), values.shape
    try:  # the header's size ignores EXIF's orientation
        size = size if size == (width, height) else read_picture(pair.image).size
    except UndecodableImageError as error:
        raise UserError(f"data: {pair.image} cannot be decoded: {error}") from error
    if size != (width, height):
        raise UserError(
            f"data: the mask {pair.mask} has {width} x {height} pixels, its image {pair.image} "
            f"{size[0]} x {size[1]}"
        )
    return set(np.unique(values).tolist())


def read_mask(path: str, in_colours: bool) -> np.ndarray:
    """Read the values of a mask, int64 [height, width]; a colour is packed into one number.

    A colour file whose three channels are equal holds numbers, unless a table has colours.
    """
    try:
        with Image.open(path) as image:
            if image.format in ("JPEG", "MPO"):
                raise ValueError("a JPEG changes the numbers of pixels; save masks as PNG")
            image.load()
            if in_colours or image.mode not in ("1", "L", "P", "I", "I;16", "I;16B"):
                pixels = np.asarray(image.convert("RGB")).astype(np.int64)
                is_grey = not in_colours and (pixels == pixels[..., :1]).all()
                return pixels[..., 0] if is_grey else packed(*np.moveaxis(pixels, -1, 0))
            # one-bit masks become 0 and 255, like other masks of two classes
            whole = image.convert("L") if image.mode == "1" else image
            return np.asarray(whole).astype(np.int64)
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"data: the mask {path} cannot be read: {error}") from error


def _unknown(pair: Pair, value: int, classes: Classes, whose: str) -> str:
    shown = f"#{value:06x}" if classes.in_colours else str(value)
    more = "" if classes.in_colours else f"; data.ignored=[{value}] leaves such pixels out"
    return (
        f"data: the mask {pair.mask} holds {shown}, which is none of the {len(classes.names)} "
        f"classes of {whose}{more}"
    )
