"""A table of image files and captions."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnkit.core.arguments import existing
from attnkit.lightning.errors import UserError
from attnkit.tasks.captioning.files import CaptionFilesData, Entries, Entry, wordless
from attnkit.tasks.images.folder import SPLIT_OF


class CaptionCsvData(CaptionFilesData):
    """A CSV file with a header and a row per caption: `image,caption`.

    An image with several captions has several rows. Other columns are not read. Captions that hold
    commas are in quotes, as every program that writes CSV puts them. A row is one line: one whose
    quotes do not end in it is a problem of that line, and never takes the lines after it with it.

    Args:
        table: the CSV file, in UTF-8.
        images: the folder that paths of images start from; None: that of the table.
        image_column: name of the column of paths; spaces around names in the header do not count.
        caption_column: name of the column of captions.
        split_column: name of a column that says train, val or test (or another usual spelling) of
            each row, the same for all rows of an image; None: val and test are taken from train.
        delimiter: what separates the columns.
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
        self.table = existing("table", table, folder=False)
        self.folder = (
            self.table.parent if images is None else existing("images", images, folder=True)
        )
        if len(delimiter) != 1:
            raise ValueError(f"delimiter: expected one character, got {delimiter!r}")
        self.image_column = image_column
        self.caption_column = caption_column
        self.split_column = split_column
        self.delimiter = delimiter

    def entries(self) -> Entries:
        found = Entries()
        entries: dict[str, Entry] = {}
        splits: dict[str, str] = {}
        lines = self._lines()
        header = self._fields(*next(lines, (f"{self.table}, line 1", "")))
        at = [self._place(header, name) for name in (self.image_column, self.caption_column)]
        split_at = None if self.split_column is None else self._place(header, self.split_column)
        for where, line in lines:
            with found.noting():
                row = self._fields(where, line)
                found.rows += 1
                if row and len(row) != len(header):
                    advice = "a row is one line"  # this may be the rest of a caption
                    if len(row) > len(header):
                        advice = f"a caption that holds {self.delimiter!r} belongs in quotes"
                    line = f"{where}: expected {len(header)} columns, got {len(row)}; {advice}"
                    found.broken.add(line)
                    found.problems.append(line)
                if len(row) != len(header):
                    continue
                name, caption = row[at[0]].strip(), row[at[1]]
                if not name:
                    raise UserError(f"data: {where}: no {self.image_column}")
                split = "train" if split_at is None else _split(row[split_at], where)
                if splits.setdefault(name, split) != split:
                    raise UserError(
                        f"data: {where}: {name} is in {split} here, but was in {splits[name]} "
                        "before"
                    )
                entry = entries.setdefault(name, Entry(str(self.folder / name), [], name, where))
                entry.captions.append(caption)
                if wordless(caption):
                    entry.where = where  # of the row to name
        for name, entry in entries.items():
            found.add(splits[name], entry)
        return found

    def _lines(self) -> Iterator[tuple[str, str]]:
        """Every line, and where it is."""
        try:
            with self.table.open(encoding="utf-8-sig", newline="") as file:
                for number, line in enumerate(file, 1):
                    yield f"{self.table}, line {number}", line
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"data: {self.table} is not a CSV file in UTF-8: {error}") from error

    def _fields(self, where: str, line: str) -> list[str]:
        """The fields of a line, [] of an empty one."""
        try:
            return next(csv.reader([line], delimiter=self.delimiter, strict=True), [])
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise UserError(
                    f"data: {where}: a quote opens that does not close in this line; a caption "
                    'holds no line ends, and a " in a quoted caption is written ""'
                ) from error
        try:  # text after a closing quote belongs to the field
            return next(csv.reader([line], delimiter=self.delimiter), [])
        except csv.Error as error:
            raise UserError(f"data: {where}: {error}") from error

    def _place(self, header: list[str], name: str) -> int:
        """Which column has this name, with the spaces around it or without."""
        stripped = [column.strip() for column in header]
        for names, wanted in ((header, name), (stripped, name.strip())):
            if names.count(wanted) == 1:
                return names.index(wanted)
        problem = "several columns" if stripped.count(name.strip()) > 1 else "no column"
        raise UserError(
            f"data: {self.table} has {problem} {name!r}, "
            f"only {', '.join(stripped) or 'an empty header'}"
        )


def _split(given: str, where: str) -> str:
    if given.strip().lower() not in SPLIT_OF:
        raise UserError(
            f"data: {where}: expected a split train, val or test, got {given.strip()!r}"
        )
    return SPLIT_OF[given.strip().lower()]
