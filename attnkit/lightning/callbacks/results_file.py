"""The figures of a run in one flat JSON file."""

import json
import os
import time
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

from attnkit.lightning.callbacks.meter import measured
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import in_log_folder, replacing


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
