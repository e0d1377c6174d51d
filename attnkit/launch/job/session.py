"""One run from its configuration: its objects, where it goes on from, what it leaves."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import lightning
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from attnkit.launch.job import folder as folders
from attnkit.launch.job import objects
from attnkit.launch.job.kinds import kind_of, named
from attnkit.lightning._private import starts_processes
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.loggers.wandb import WandbRun
from attnkit.lightning.resume import checkpoints


class Session:
    """A run in this process. `run` does the work of its kind, which builds the objects here.

    Args:
        config: resolved. Nulls of `model` and `module` that the data decides are filled in.
        alone: the checkpoint to test or predict with is all there is; `config` knows no sizes.
        callbacks: names of those that were asked for on the command line.
        begin: called when all objects are built and nothing is written yet. Returns whether this
            process goes on; False where others do the work.
    """

    data: LightningDataModule
    module: LightningModule
    trainer: Trainer

    def __init__(
        self,
        config: dict[str, Any],
        *,
        alone: bool = False,
        callbacks: Collection[str] = (),
        begin: Callable[[Session], bool] = lambda session: True,
    ) -> None:
        self.config = config
        self.kind = kind_of(config["run"])
        self.folder = Path(config["run_dir"])
        self.alone = alone
        self.ended_by = ""
        self._asked = callbacks
        self._begin = begin
        self._started = time.perf_counter()
        self._seed()
        self.start, self.broken = self._newest_checkpoint()
        if config["ckpt"] is not None:
            checkpoints.load(config["ckpt"], mmap=True)  # before anything is built or written

    # --- building ---

    def make_data(self) -> LightningDataModule:
        """The data; what it knows of itself goes into the configuration of the module."""
        self.data = objects.make_data(self.config)
        if not self.alone:
            objects.fill_from_data(self.config, self.data)
        return self.data

    def make_predict_data(self, module: LightningModule) -> LightningDataModule:
        """The data to predict."""
        self.data = objects.make_predict_data(self.config, module)
        return self.data

    def make_module(self) -> LightningModule:
        """The module; its first weights depend on the seed only, not on what the data has drawn."""
        self._seed()
        fresh = self.start is None and self.config["ckpt"] is None
        if self.alone:
            self.module = objects.load_module(self.config)
        else:
            self.module = objects.make_module(self.config, pretrained=fresh)
        if "compile" in self.kind.uses:
            objects.compile_model(self.module, self.config["compile"])
        return self.module

    def make_trainer(self) -> Trainer:
        """The trainer, with the callbacks and loggers that take part."""
        self.trainer = objects.make_trainer(self.config, self.kind, self._asked)
        return self.trainer

    def begin(self) -> bool:
        """To be called when all is built; whether this process does the rest."""
        return self._begin(self)

    # --- what is known then ---

    @property
    def needs_processes(self) -> bool:
        """Whether the trainer wants several processes, which must not start from this one."""
        return starts_processes(self.trainer)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    @property
    def ckpt(self) -> str | None:
        """The checkpoint whose weights the module does not have yet."""
        return None if self.alone else self.config["ckpt"]

    def loaded(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call a function of the trainer that loads the checkpoint; only plain data is read."""
        call = partial(function, self.module, datamodule=self.data, weights_only=True, **arguments)
        wrong = () if self.kind.trains else (KeyError,)
        return objects.loaded(call, arguments.get("ckpt_path"), wrong)

    # --- running ---

    def run(self) -> None:
        """Do the work; its figures go to results.json, and that it is done to state.json."""
        done = False
        try:
            figures = self._work()
            done = True
        finally:
            for logger in (getattr(self, "trainer", None) and self.trainer.loggers) or ():
                if isinstance(logger, WandbRun):
                    logger.close(failed=not done)
        if figures is None or not self.trainer.is_global_zero:
            return
        figures["seconds"] = round(self._seconds_before() + time.perf_counter() - self._started, 2)
        before = folders.load_results(self.folder)
        folders.save_results(self.folder, {**before, **figures, "num_seeds": 1})
        progress = {k: figures[k] for k in ("epochs", "steps") if k in figures}
        folders.save_state(self.folder, folders.DONE, ended_by=self.ended_by, **progress)

    def _work(self) -> dict[str, float] | None:
        try:
            return named(self.kind.work)(self)
        except SystemExit:
            if self.trainer.interrupted:  # Lightning's way to answer Ctrl-C
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt from None
            raise
        except MisconfigurationException as error:
            raise UserError(f"trainer: {first_line(error)}") from error
        except RuntimeError as error:
            if not str(error).startswith("Early stopping conditioned on metric"):
                raise
            raise UserError(f"callbacks: {first_line(error)}") from error

    def metrics(self) -> dict[str, float]:
        """The finite ones that were logged last."""
        logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        return {name: value for name, value in logged.items() if math.isfinite(value)}

    def _seed(self) -> None:
        lightning.seed_everything(self.config["seed"], workers=True, verbose=False)

    def _newest_checkpoint(self) -> tuple[Path | None, list[checkpoints.CheckpointError]]:
        """The newest checkpoint that is intact, and what is wrong with those newer than it."""
        if not self.kind.trains:
            return None, []
        start, broken = checkpoints.newest_intact(self.folder / folders.CHECKPOINTS)
        if broken and start is None:
            raise broken[0]
        return start, broken

    def _seconds_before(self) -> float:
        """What the run had taken until the checkpoint it goes on from."""
        if self.start is None:
            return 0.0
        states = checkpoints.load(self.start, mmap=True).get("callbacks", {})
        return float(states.get("ResultsFile", {}).get("seconds", 0.0))
