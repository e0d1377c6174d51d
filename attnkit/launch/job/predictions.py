"""`run=predict`: predictions.csv, in the order of the images."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnkit.lightning.errors import UserError

if TYPE_CHECKING:
    from lightning import Trainer

    from attnkit.launch.job.session import Session

FILE = "predictions.csv"
Row = dict[str, str]


def predict(session: Session) -> dict[str, float] | None:
    """Predict with the checkpoint; leaves predictions.csv."""
    session.make_predict_data(session.make_module())
    trainer = session.make_trainer()
    if not session.begin():
        return None
    batches = session.loaded(trainer.predict, ckpt_path=session.ckpt)
    rows = gathered(rows_of(batches or []), trainer)
    if not rows:
        images = session.config["images"]
        nothing = f"images: nothing in {images}" if images else "data: nothing"
        raise UserError(f"{nothing} could be predicted")
    if trainer.is_global_zero:
        save_predictions(session.folder, rows)
    return {"predictions": len(rows)}


def rows_of(batches: Sequence[Any]) -> list[Row]:
    """One row per sample of what every `predict_step` returned.

    A step returns a mapping of names to lists (or tensors) as long as the batch.
    """
    rows: list[Row] = []
    for batch in batches:
        columns = {key: _cells(value) for key, value in _columns(batch).items()}
        length = max(map(len, columns.values()), default=0)
        rows += [{k: v[i] for k, v in columns.items() if i < len(v)} for i in range(length)]
    return rows


def gathered(rows: list[Row], trainer: Trainer) -> list[Row]:
    """The rows of all ranks in the order of the ranks, in every rank.

    A data module gives each rank its part, one after the other, in a `DistributedSampler`; where
    it does not, every rank has predicted everything.
    """
    from torch import distributed

    if trainer.world_size == 1 or not _is_shared(trainer.predict_dataloaders):
        return rows
    parts: list[list[Row]] = [[] for _ in range(trainer.world_size)]
    distributed.all_gather_object(parts, rows)
    return [row for part in parts for row in part]


def _is_shared(loaders: Any) -> bool:
    from torch.utils.data import DistributedSampler

    for loader in loaders if isinstance(loaders, Sequence) else [loaders]:
        # Lightning keeps the sampler of a loader to predict only inside its batch sampler.
        batches = getattr(loader, "batch_sampler", None)
        sampler = getattr(loader if batches is None else batches, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            return True
    return False


def save_predictions(folder: Path, rows: Sequence[Row]) -> None:
    """Write predictions.csv."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / FILE).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


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
