"""metrics.csv and steps.csv in the run folder itself, which a resumed run continues."""

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from attnkit.lightning._private import ExperimentWriter
from attnkit.lightning.files import write_csv
from attnkit.lightning.loggers.counting import from_one

STEP = "step/"  # what `StepMetrics` logs


class MetricsCSV(CSVLogger):
    """A CSV file with a row for each epoch, and one for the steps between.

    `metrics.csv` has a row for each epoch, training and validation side by side, and one for the
    test; a validation within an epoch has a row of its own. `steps.csv` has what `StepMetrics`
    logs: columns epoch, step, loss, lr, grad_norm, samples_per_second. Epochs count from 1, and
    `step` is the number of steps that were done. Otherwise it is Lightning's `CSVLogger`, except
    that rows written before stay when a run is resumed.

    Args:
        save_dir: the folder the files lie in.
        flush_logs_every_n_steps: how often metrics.csv is brought up to date.
    """

    def __init__(self, save_dir: str | Path, flush_logs_every_n_steps: int = 100) -> None:
        super().__init__(
            save_dir, name="", version="", flush_logs_every_n_steps=flush_logs_every_n_steps
        )
        self._steps: _Writer | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            self._experiment = _Epochs(str(self.save_dir))
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        counted = from_one(metrics)
        if not any(name.startswith(STEP) for name in counted):
            is_test = "epoch" in metrics and "epoch" not in counted
            # Lightning names the step that is under way; a test comes after the last.
            done = step if step is None or is_test else step + 1
            return super().log_metrics(counted, done)
        if self._steps is None:
            self._steps = _Steps(str(self.save_dir))
        self._steps.log_metrics({n.removeprefix(STEP): v for n, v in counted.items()}, step)
        return self._steps.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if isinstance(self._experiment, _Epochs):
            self._experiment.finish()
        super().finalize(status)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml lies beside metrics.csv."""


class _Writer(ExperimentWriter):
    """A file that is continued, without the rows of steps that come again."""

    def _check_log_dir_exists(self) -> None:
        # Lightning deletes the file here; instead, its columns are taken over.
        self._continues = os.path.isfile(self.metrics_file_path)
        if self._continues:
            with open(self.metrics_file_path, newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        if self._continues and step is not None:
            self._continues = False
            self._drop_from(step, is_test="epoch" not in metrics_dict)
        super().log_metrics(metrics_dict, step)

    def _drop_from(self, step: int, *, is_test: bool) -> None:
        """Leave out rows of steps that come again, and one that a crash left half written; before a
        test, which has no epoch, the row of the last epoch stays."""
        with open(self.metrics_file_path, newline="") as file:
            rows = list(csv.DictReader(file))
        whole = [row for row in rows if (row["step"] or "").isdecimal()]
        former = any(row.get("epoch") == "0" for row in whole)
        if former:  # epochs and steps counted from 0 once
            whole = [_counted(row) for row in whole]
        kept = [row for row in whole if int(row["step"]) < step + (is_test and row["epoch"] != "")]
        if len(kept) < len(rows) or former:
            keys = self.metrics_keys
            write_csv(Path(self.metrics_file_path), keys, ([row[k] for k in keys] for row in kept))


class _Steps(_Writer):
    NAME_METRICS_FILE = "steps.csv"


class _Epochs(_Writer):
    """Holds a row of validation until that of training comes, which follows in the same step."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self._held: tuple[dict[str, float], int | None] | None = None

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        held, self._held = self._held, None
        if held and held[1] == step and held[0].get("epoch") == metrics_dict.get("epoch"):
            metrics_dict = {**held[0], **metrics_dict}
        elif held:
            super().log_metrics(*held)
        if all(name == "epoch" or name.startswith("val/") for name in metrics_dict):
            self._held = (metrics_dict, step)
        else:
            super().log_metrics(metrics_dict, step)

    def finish(self) -> None:
        """Write the row that is still held."""
        if self._held:
            super().log_metrics(*self._held)
            self._held = None


def _counted(row: dict[str, Any]) -> dict[str, Any]:
    is_test = any(value for name, value in row.items() if name.startswith("test/"))
    if is_test:
        return {**row, "epoch": ""}
    return {**row, "epoch": str(int(row["epoch"]) + 1), "step": str(int(row["step"]) + 1)}
