"""A table of image files and captions."""

import csv
from pathlib import Path
from typing import Any

from attnkit.lightning.arguments import existing
from attnkit.lightning.errors import UserError
from attnkit.tasks.captioning.files import CaptionFilesData, Entries, Entry
from attnkit.tasks.images.folder import SPLIT_OF


class CaptionCsvData(CaptionFilesData):
    """A CSV file with a header and a row per caption: `image,caption`.

    An image with several captions has several rows. Other columns are not read. Captions that hold
    commas are in quotes, as every program that writes CSV puts them.

    Args:
        table: the CSV file, in UTF-8.
        images: the folder that paths of images start from; None: that of the table.
        image_column: name of the column of paths.
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
        entries: dict[str, Entry] = {}
        splits: dict[str, str] = {}
        for where, row in self._rows():
            name = row[self.image_column].strip()
            if not name:
                raise UserError(f"data: {where}: no {self.image_column}")
            split = self._split(row, where)
            if splits.setdefault(name, split) != split:
                raise UserError(
                    f"data: {where}: {name} is in {split} here, but was in {splits[name]} before"
                )
            entry = entries.setdefault(name, Entry(str(self.folder / name), [], name, where))
            entry.captions.append(row[self.caption_column])
            if not entry.captions[-1].strip():
                entry.where = where  # of the row to name
        found = Entries()
        for name, entry in entries.items():
            found.add(splits[name], entry)
        return found

    def _split(self, row: dict[str, str], where: str) -> str:
        if self.split_column is None:
            return "train"
        given = row[self.split_column].strip()
        if given.lower() not in SPLIT_OF:
            raise UserError(f"data: {where}: expected a split train, val or test, got {given!r}")
        return SPLIT_OF[given.lower()]

    def _rows(self) -> list[tuple[str, dict[str, str]]]:
        """Every row, and where it is."""
        columns = [self.image_column, self.caption_column, self.split_column]
        rows = []
        try:
            with self.table.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file, delimiter=self.delimiter)
                header = reader.fieldnames or []
                if missing := [name for name in columns if name and name not in header]:
                    raise UserError(
                        f"data: {self.table} has no column {missing[0]!r}, "
                        f"only {', '.join(header) or 'an empty header'}"
                    )
                for row in reader:
                    where = f"{self.table}, line {reader.line_num}"
                    count = len(header) - list(row.values()).count(None) + len(row.get(None, ()))
                    if count != len(header):
                        raise UserError(
                            f"data: {where}: expected {len(header)} columns, got {count}; "
                            "a caption that holds a comma belongs in quotes"
                        )
                    rows.append((where, row))
        except (csv.Error, OSError, UnicodeDecodeError) as error:
            raise UserError(f"data: {self.table} is not a CSV file in UTF-8: {error}") from error
        return rows
