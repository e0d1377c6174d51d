"""Data module of a CSV table of image files and captions."""

from pathlib import Path
from typing import Any

from attnkit.core.arguments import existing
from attnkit.lightning.errors import UserError
from attnkit.tasks.captioning.files import CaptionFilesData, Entries, Entry, wordless
from attnkit.tasks.images.table import Table, split_in


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
