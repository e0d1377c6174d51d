"""The files of results: the figures of a run in results.json, and predictions as a table."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import distributed
from torch.utils.data import DistributedSampler

from attnkit.lightning.callbacks.meter import measured
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import in_log_folder, replacing, write_csv

# Number of the dataloader, of the sample in its data, and of the row among those of that sample.
Key = tuple[int, int, int]
Row = dict[str, str]


class ResultsFile(Callback):
    """Writes the last value of every logged metric to `results.json`: flat, numbers only.

    It is written when training, a test or a separate validation ends; figures of earlier stages are
    kept, so that one file holds `train/…`, `val/…` and `test/…`. It also has the `seconds` spent in
    fit, test and validate (before a resume, too), `epochs`, `steps`, and the numbers in the
    attribute `results` of any other callback (such as `KernelRecord`). A value that is not finite
    is left out with a warning, since JSON has no such numbers.

    Args:
        path: path of the file; None: `results.json` in the trainer's log folder.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._given_path = path
        self.path: Path | None = None
        self._seconds_before = 0.0
        self._started: float | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.path = in_log_folder(trainer, self._given_path, "results.json")
        self._started = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._write(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._seconds_before = self.seconds
        self._started = None

    @property
    def seconds(self) -> float:
        """Seconds spent so far in fit, test and validate."""
        now = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._seconds_before + now

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A test loads its checkpoint's state too; the time since then was counted here already.
        self._seconds_before = max(self._seconds_before, state_dict["seconds"])

    def _write(self, trainer: Trainer, *args: Any) -> None:
        if not trainer.is_global_zero:
            return
        assert self.path is not None
        results = _read(self.path)
        results.update(measured(trainer))
        if trainer.state.fn == "fit":
            results["epochs"] = trainer.current_epoch
            results["steps"] = trainer.global_step
        results["seconds"] = round(self.seconds, 3)
        with replacing(self.path) as file:
            file.write(f"{json.dumps(results, indent=2, sort_keys=True)}\n".encode())

    on_fit_end: Any = _write
    on_test_end: Any = _write


def _read(path: Path) -> dict[str, float]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{path}: expected a results file in JSON: {error}") from error


class PredictionsFile(BasePredictionWriter):
    """Writes what `predict_step` returns to `predictions.csv`, in the order of the data.

    A step returns a mapping of column names to lists or tensors as long as the batch, or one such
    list or tensor, the column `prediction`. The first of several processes writes the rows of all.
    Where each process predicts all of the data, it writes only its own.

    Args:
        path: path of the file; None: `predictions.csv` in the trainer's log folder.

    Attributes:
        path: path of the file, from the start of a prediction.
        num_rows: number of rows of the last prediction, the same in every process.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__("batch")
        self._given_path = path
        self.path: Path | None = None
        self.num_rows = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.path = in_log_folder(trainer, self._given_path, "predictions.csv")
        self._names: dict[str, None] = {}
        self._rows: list[tuple[Key, Row]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        columns = prediction if isinstance(prediction, Mapping) else {"prediction": prediction}
        cells = {name: _cells(value) for name, value in columns.items()}
        self._names.update(dict.fromkeys(cells))
        length = max(map(len, cells.values()), default=0)
        rows = [{k: v[i] for k, v in cells.items() if i < len(v)} for i in range(length)]
        # Lightning keeps the indices of an earlier loader if it cannot know those of this one.
        if not hasattr(_batch_sampler(_loaders(trainer)[dataloader_idx]), "seen_batch_indices"):
            batch_indices = None
        if batch_indices and isinstance(batch_indices[0], list):  # from a sampler of lists
            batch_indices = [number for one in batch_indices for number in one]
        for place, row in enumerate(rows):
            if not batch_indices:
                key = (dataloader_idx, len(self._rows), 0)
            elif len(rows) == len(batch_indices):
                key = (dataloader_idx, int(batch_indices[place]), 0)
            else:  # a step may leave samples out
                key = (dataloader_idx, int(batch_indices[0]), place)
            self._rows.append((key, row))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # No other hook at the end is called in a process whose part of the data is empty.
        if stage != "predict":
            return
        names, rows = self._gathered(trainer)
        self.num_rows = len(rows)
        if trainer.is_global_zero:
            assert self.path is not None
            rows.sort(key=lambda pair: pair[0])
            write_csv(self.path, names, ([row.get(name) for name in names] for _, row in rows))
        self._rows = []

    def _gathered(self, trainer: Trainer) -> tuple[list[str], list[tuple[Key, Row]]]:
        """Return the names of columns, and the rows of all processes, each sample's once."""
        if trainer.world_size == 1:
            return list(self._names), self._rows
        parts: list[Any] = [None] * trainer.world_size
        distributed.all_gather_object(parts, (self._names, self._rows))
        shared = [
            isinstance(getattr(_batch_sampler(loader), "sampler", None), DistributedSampler)
            or isinstance(getattr(loader, "sampler", None), DistributedSampler)
            for loader in _loaders(trainer)
        ]
        names: dict[str, None] = {}
        rows: dict[Key, Row] = {}
        for rank, (part_names, part) in enumerate(parts):
            names.update(part_names)
            rows.update((key, row) for key, row in part if rank == 0 or shared[key[0]])
        return list(names), list(rows.items())


def _loaders(trainer: Trainer) -> Sequence[Any]:
    loaders = trainer.predict_dataloaders
    return loaders if isinstance(loaders, Sequence) else [loaders]


def _batch_sampler(loader: Any) -> Any:
    """Return the batch sampler of a loader, in which Lightning keeps its sampler too."""
    return getattr(loader, "batch_sampler", None)


def _cells(value: Any) -> list[str]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    values = value if isinstance(value, list | tuple) else [value]
    return [f"{v:.6f}" if isinstance(v, float) else _cell(v) for v in values]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list | tuple):  # ranked pairs of a name and a number, or plain values
        pairs = all(isinstance(v, list | tuple) for v in value)
        return "; ".join(" ".join(map(_cell, v)) if pairs else _cell(v) for v in value)
    return str(value)
