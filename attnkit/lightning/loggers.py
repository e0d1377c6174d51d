"""Loggers for any Trainer: Lightning's, continued in a resumed run, with epochs counted from 1.

Lightning counts epochs from 0; everything else that attnkit writes counts from 1, as people do.
"""

import csv
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from attnkit.lightning._private import ExperimentWriter, wandb_arguments
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.files import write_csv, write_text

STEP = "step/"  # prefix of what `Meter` logs
_ID = Path("wandb", "id")  # file in the run folder


def from_one(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics with their epoch counted from 1.

    Metrics of a test have no epoch: they belong to the tested checkpoint.
    """
    counted = dict(metrics)
    if "epoch" in counted:
        counted["epoch"] += 1
        if any(name.startswith("test/") for name in counted):
            del counted["epoch"]
    return counted


def log_picture(trainer: Trainer, name: str, pixels: np.ndarray) -> None:
    """Log a picture, uint8 [height, width, 3], to every logger that takes images: Weights & Biases
    and TensorBoard."""
    for logger in trainer.loggers:
        if hasattr(logger, "log_image"):
            logger.log_image(name, images=[pixels], step=trainer.global_step)
            continue
        writer: Any = getattr(logger, "experiment", None)
        if writer is not None and hasattr(writer, "add_image"):
            writer.add_image(name, pixels, trainer.global_step, dataformats="HWC")


class MetricsCSV(CSVLogger):
    """A CSV file with a row for each epoch, and one for the steps between.

    `metrics.csv` has a row for each epoch, training and validation side by side, and one for the
    test; a validation within an epoch has a row of its own. `steps.csv` has what `Meter`
    logs: columns epoch, step, loss, lr, grad_norm, samples_per_second. Epochs count from 1, and
    `step` is the number of steps that were done. Otherwise it is Lightning's `CSVLogger`, except
    that earlier rows stay when a run is resumed.

    Args:
        save_dir: folder of the files.
        flush_logs_every_n_steps: number of steps between updates of metrics.csv.
    """

    def __init__(self, save_dir: str | Path, flush_logs_every_n_steps: int = 100) -> None:
        super().__init__(
            save_dir, name="", version="", flush_logs_every_n_steps=flush_logs_every_n_steps
        )
        self._steps: _Table | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            self._experiment = _Table(self.save_dir, "metrics.csv")
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        counted = from_one(metrics)
        if any(name.startswith(STEP) for name in counted):
            self._steps = self._steps or _Table(self.save_dir, "steps.csv")
            self._steps.log_metrics({n.removeprefix(STEP): v for n, v in counted.items()}, step)
            self._steps.save()
            return
        is_test = "epoch" in metrics and "epoch" not in counted
        if step is not None and not is_test:  # Lightning passes the step under way
            step += 1
        super().log_metrics(counted, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if isinstance(self._experiment, _Table):
            self._experiment.write_held()
        super().finalize(status)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml lies beside metrics.csv."""


class _Table(ExperimentWriter):
    """A CSV file that is continued, without the rows of repeated steps.

    It holds a row of validation back until the row of training, which follows in the same step.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.NAME_METRICS_FILE = name
        self._held: tuple[dict[str, float], int | None] | None = None
        super().__init__(folder)

    def _check_log_dir_exists(self) -> None:
        # Lightning deletes the file here; this class keeps it and its columns.
        self._continues = os.path.isfile(self.metrics_file_path)
        if self._continues:
            with open(self.metrics_file_path, newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        if self._continues and step is not None:
            self._continues = False
            self._drop_from(step, is_test="epoch" not in metrics_dict)
        held, self._held = self._held, None
        if held and held[1] == step and held[0].get("epoch") == metrics_dict.get("epoch"):
            metrics_dict = {**held[0], **metrics_dict}
        elif held:
            super().log_metrics(*held)
        if all(name == "epoch" or name.startswith("val/") for name in metrics_dict):
            self._held = metrics_dict, step
        else:
            super().log_metrics(metrics_dict, step)

    def write_held(self) -> None:
        """Write the row that is held back, if any."""
        if self._held:
            super().log_metrics(*self._held)
            self._held = None

    def _drop_from(self, step: int, *, is_test: bool) -> None:
        """Remove rows of repeated steps, and one that a crash left half written; before a test,
        which has no epoch, the row of the last epoch stays."""
        with open(self.metrics_file_path, newline="") as file:
            rows = list(csv.DictReader(file))
        whole = [row for row in rows if (row["step"] or "").isdecimal()]
        kept = [row for row in whole if int(row["step"]) < step + (is_test and row["epoch"] != "")]
        if len(kept) < len(rows):
            keys = self.metrics_keys
            write_csv(Path(self.metrics_file_path), keys, ([row[k] for k in keys] for row in kept))


class TensorBoard(TensorBoardLogger):
    """Lightning's `TensorBoardLogger`, except that the first epoch is 1, as in all other files."""

    @rank_zero_only
    def log_run(self, config: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """Log a run's configuration and results for the page of hyper-parameters.

        Args:
            config: configuration, also written to hparams.yaml.
            figures: results by name; on the page their names begin with `hp/`.
        """
        self.log_hyperparams(dict(config), {f"hp/{k}": v for k, v in figures.items()})
        self.save()

    @rank_zero_only
    def save(self) -> None:
        """Write hparams.yaml as plain data: Lightning's writer fails at `${` in a text."""
        path = Path(self.log_dir, self.NAME_HPARAMS_FILE)
        if not path.exists():
            with suppress(yaml.YAMLError):  # Lightning writes the names of objects
                write_text(path, yaml.safe_dump(dict(self.hparams), allow_unicode=True))
        super().save()

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics(from_one(metrics), step)


class WandbRun(WandbLogger):
    """Lightning's `WandbLogger`, with five differences.

    - Its files are in `save_dir`/wandb, and its configuration is the config.yaml in `save_dir`.
    - A resumed run continues the same W&B run, whose id is stored in the folder.
    - It ends with the run, with or without an error, so that later runs in the same process (seeds,
      sweeps) have their own.
    - Epochs count from 1.
    - `offline` holds for this run alone; Lightning sets WANDB_MODE for the whole process.

    Args:
        save_dir: the run folder.
        project: W&B project.
        entity: W&B user or team; None: W&B's setting.
        name: name of the run; None: the folder's.
        group: group of runs, such as those of one sweep.
        tags: tags of the run.
        offline: whether to write to the folder alone; `wandb sync` sends it later.

    Raises:
        UserError: W&B is not installed, or it refuses the run.
    """

    def __init__(
        self,
        save_dir: str | Path,
        project: str = "attnkit",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        offline: bool = False,
    ) -> None:
        try:  # a folder called wandb, which W&B leaves where it ran, can be imported, too
            metadata.version("wandb")
        except metadata.PackageNotFoundError:
            raise UserError(
                "logger.wandb: needs wandb: not installed\n  pip install 'attnkit[wandb]'"
            ) from None
        self._folder = Path(save_dir)
        super().__init__(
            name=name or self._folder.name,
            save_dir=str(save_dir),
            project=project,
            entity=entity,
            group=group,
            tags=list(tags) if tags else None,
            mode="offline" if offline else None,
            # run.log and the screen are attnkit's; offline there is no address to print either
            settings={"console": "off", "silent": offline},
        )
        wandb_arguments(self).pop("anonymous", None)  # Lightning passes None, of which W&B warns

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            import wandb

            # the id is known when the run has begun, after this logger was created
            self._id = self._known_id()
            wandb_arguments(self).update(id=self._id, config=self._config())
            try:
                return super().experiment
            except wandb.errors.Error as error:
                raise UserError(
                    f"logger.wandb: {first_line(error)}\n"
                    "  without a network: logger.wandb.offline=true"
                ) from error
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics as Lightning does, with epochs counted from 1."""
        super().log_metrics(from_one(metrics), step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the whole configuration is logged at the start."""

    @rank_zero_only
    def close(self, *, failed: bool) -> None:
        """End the W&B run, if it has begun."""
        if self._experiment is not None:
            self._experiment.finish(exit_code=int(failed))
            self._experiment = None

    def _known_id(self) -> str:
        path = self._folder / _ID
        if not path.is_file():
            write_text(path, f"{secrets.token_hex(4)}\n")
        return path.read_text().strip()

    def _config(self) -> dict[str, Any]:
        path = self._folder / "config.yaml"
        return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
