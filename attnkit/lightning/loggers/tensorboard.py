"""TensorBoard, with epochs that count from 1."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from attnkit.lightning.files import write_text
from attnkit.lightning.loggers.counting import from_one


class TensorBoard(TensorBoardLogger):
    """Lightning's `TensorBoardLogger`, except that the first epoch is 1, as in all other files."""

    @rank_zero_only
    def log_run(self, config: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """For the page of hyper-parameters: a run's configuration and what came of it.

        Args:
            config: goes to hparams.yaml as well.
            figures: by name; there they begin with `hp/`.
        """
        self.log_hyperparams(dict(config), {f"hp/{k}": v for k, v in figures.items()})
        self.save()

    @rank_zero_only
    def save(self) -> None:
        """Write hparams.yaml as plain data: Lightning's writer fails at `${` in a text."""
        path = Path(self.log_dir, self.NAME_HPARAMS_FILE)
        if not path.exists():
            with suppress(yaml.YAMLError):  # objects, of which Lightning writes the names
                write_text(path, yaml.safe_dump(dict(self.hparams), allow_unicode=True))
        super().save()

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics(from_one(metrics), step)
