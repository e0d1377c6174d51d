"""Reads rows of numbers and words from Parquet files, with pyarrow."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from attnkit.lightning.errors import UserError, first_line
from attnkit.tasks.graphs.files.part import Form, Part, are_whole
from attnkit.tasks.graphs.files.stand_ins import refuse_stand_in

ROWS = 1_000_000  # rows that are converted to Python's texts at a time


class Parquet(Part):
    """A Parquet file; columns without a name and pandas' index columns form its index."""

    def array(self, dtype: Any = None, columns: int | None = None) -> np.ndarray:
        found = self._columns()
        whole = np.issubdtype(dtype, np.integer)
        expected = "whole numbers" if whole else "numbers"
        if columns not in (None, len(found)):
            names = list(found)
            raise UserError(f"{self.path}: expected {columns} columns of {expected}, got {names}")
        numbers = np.empty((len(next(iter(found.values()))), len(found)), dtype)
        for place, (name, column) in enumerate(found.items()):
            values = column.to_numpy()
            if values.dtype.kind not in "iufb" or (whole and not are_whole(values).all()):
                raise UserError(
                    f"{self.path}: column {name}: expected {expected}, got {values.dtype}"
                )
            numbers[:, place] = values
        return numbers

    def _words(self, count: int | None) -> np.ndarray:
        return np.stack(list(map(_texts, self._columns().values())), axis=1)

    def fields(self) -> Iterator[tuple[list[str], str]]:
        columns = list(self._columns().values())
        for start in range(0, len(columns[0]), ROWS):
            words = (_texts(column.slice(start, ROWS)).astype(str).tolist() for column in columns)
            for row, fields in enumerate(zip(*words, strict=True), start):
                yield list(fields), f", row {row}"

    def place_of(self, row: int) -> str:
        return f"{self.where}, row {row + self._skipped}"

    def _columns(self) -> dict[str, Any]:
        """Return Arrow's columns by name, without those of the index."""
        refuse_stand_in(self.path)
        try:
            from pyarrow import ArrowException
            from pyarrow.parquet import ParquetFile
        except ImportError as error:
            raise UserError(
                f"{self.path}: Parquet needs pyarrow: pip install 'attnkit[parquet]'"
            ) from error
        try:
            with ParquetFile(self.path) as file:
                table = file.read()
        except (ArrowException, OSError) as error:
            raise UserError(f"{self.path}: cannot be read: {first_line(error)}") from error
        described = (table.schema.pandas_metadata or {}).get("index_columns", ())
        columns = dict(zip(table.column_names, table.columns, strict=True))
        self.index = [
            (f"its index {name!r}", columns.pop(name).to_numpy())
            for name in table.column_names
            if name in described or re.fullmatch(r"Unnamed: \d+|", name)
        ]
        for i in described:
            if isinstance(i, dict) and i.get("kind") == "range":  # only in the metadata
                numbers = np.arange(i["start"], i["stop"], i["step"])
                if len(numbers) == table.num_rows:  # pandas ignores an index of another length
                    self.index.append((f"its index {i['start']}, …", numbers))
        if not columns:
            raise UserError(f"{self.path}: expected columns of values, got none")
        self.form = Form(header=list(columns))
        return columns


def _texts(column: Any) -> np.ndarray:
    """Return words as text, with "" for missing ones; numbers stay as they are."""
    values = column.to_numpy()
    if values.dtype.kind != "O":
        return values
    return np.array(["" if word is None else str(word) for word in values], str)
