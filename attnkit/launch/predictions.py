"""What `run=predict` leaves: predictions.csv and the first of them on screen."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = "predictions.csv"


def save_predictions(folder: Path, batches: Sequence[Any]) -> int:
    """Write what every `predict_step` returned, one line per sample; returns how many.

    A step returns a mapping of names to lists (or tensors) as long as the batch.
    """
    rows: list[dict[str, str]] = []
    for batch in batches:
        columns = {key: _cells(value) for key, value in _columns(batch).items()}
        length = max(map(len, columns.values()), default=0)
        rows += [{k: v[i] for k, v in columns.items() if i < len(v)} for i in range(length)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / FILE).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return len(rows)


def _columns(batch: Any) -> Mapping[str, Any]:
    return batch if isinstance(batch, Mapping) else {"prediction": batch}


def _cells(value: Any) -> list[str]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_cell(v) for v in value] if isinstance(value, list | tuple) else [_cell(value)]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list | tuple):  # ranked pairs of a name and a number, or plain values
        pairs = all(isinstance(v, list | tuple) for v in value)
        return "; ".join(" ".join(map(_cell, v)) if pairs else _cell(v) for v in value)
    return str(value)
