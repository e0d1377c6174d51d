"""metrics.csv in the run folder itself, which a resumed run continues."""

import csv
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment

from attnkit.lightning._private import ExperimentWriter
from attnkit.lightning.files import write_csv


class MetricsCSV(CSVLogger):
    """Lightning's `CSVLogger`, except that rows written before stay when a run is resumed.

    Args:
        save_dir: the folder metrics.csv lies in.
        flush_logs_every_n_steps: how often the file is brought up to date.
    """

    def __init__(self, save_dir: str | Path, flush_logs_every_n_steps: int = 100) -> None:
        super().__init__(
            save_dir, name="", version="", flush_logs_every_n_steps=flush_logs_every_n_steps
        )

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            self._experiment = _Writer(str(self.save_dir))
        return self._experiment

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml lies beside metrics.csv."""


class _Writer(ExperimentWriter):
    def _check_log_dir_exists(self) -> None:
        # Lightning deletes the file here; instead, its columns are taken over.
        self._continues = os.path.isfile(self.metrics_file_path)
        if self._continues:
            with open(self.metrics_file_path, newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        if self._continues and step is not None:
            self._continues = False
            self._drop_from(step)
        super().log_metrics(metrics_dict, step)

    def _drop_from(self, step: int) -> None:
        """Leave out rows of steps that come again, and one that a crash left half written."""
        with open(self.metrics_file_path, newline="") as file:
            rows = list(csv.DictReader(file))
        kept = [row for row in rows if (row["step"] or "").isdecimal() and int(row["step"]) < step]
        if len(kept) < len(rows):
            keys = self.metrics_keys
            write_csv(Path(self.metrics_file_path), keys, ([row[k] for k in keys] for row in kept))
