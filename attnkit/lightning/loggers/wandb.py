"""Weights & Biases, in the run folder and with the run's life: one run there for one run here."""

import secrets
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from attnkit.lightning._private import wandb_arguments
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.files import replacing
from attnkit.lightning.loggers.counting import from_one

ID = Path("wandb", "id")  # in the run folder


class WandbRun(WandbLogger):
    """Lightning's `WandbLogger`, with five differences.

    - Its files are in `save_dir`/wandb, and what it logs as configuration is the config.yaml there.
    - A run that is resumed goes on in the same W&B run: its id lies in the folder.
    - It ends when the run does, with or without an error, so that runs that follow in the same
      process (seeds, sweeps) have their own.
    - Epochs count from 1.
    - `offline` is this run's alone; Lightning's sets WANDB_MODE for the whole process.

    Args:
        save_dir: the run folder.
        project: of W&B.
        entity: user or team; None: as W&B is set up.
        name: of the run; None: the folder's.
        group: of runs, such as those of one sweep.
        tags: of the run.
        offline: write to the folder alone; `wandb sync` sends it later.

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
        try:  # a folder called wandb, which W&B leaves wherever it ran, can be imported, too
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
        )
        if offline:
            wandb_arguments(self)["mode"] = "offline"
        wandb_arguments(self).pop("anonymous", None)  # Lightning's None, which W&B warns of
        self._silent = offline

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            import wandb

            wandb_arguments(self)["id"] = self._id = self._known_id()
            wandb_arguments(self)["config"] = self._config()
            # run.log and the screen are attnkit's; offline there is not even an address to tell
            wandb_arguments(self)["settings"] = wandb.Settings(console="off", silent=self._silent)
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
        """Lightning's, with epochs that count from 1."""
        super().log_metrics(from_one(metrics), step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the whole configuration is logged at the start."""

    @rank_zero_only
    def close(self, *, failed: bool) -> None:
        """End the W&B run, if it began."""
        if self._experiment is not None:
            self._experiment.finish(exit_code=int(failed))
            self._experiment = None

    def _known_id(self) -> str:
        path = self._folder / ID
        if not path.is_file():
            with replacing(path) as file:
                file.write(f"{secrets.token_hex(4)}\n".encode())
        return path.read_text().strip()

    def _config(self) -> dict[str, Any]:
        path = self._folder / "config.yaml"
        return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
