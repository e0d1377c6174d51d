"""`run=train`: trainer, data, module, fit and test, in this order."""

from __future__ import annotations

import logging
import math

from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from attnkit.launch.errors import OutOfMemory, allocator_message, is_out_of_memory
from attnkit.launch.run import Run
from attnkit.lightning._private import epoch_ends
from attnkit.lightning.callbacks.meter import measured
from attnkit.lightning.callbacks.progress import EpochLines
from attnkit.lightning.console import say
from attnkit.lightning.loggers import TensorBoard
from attnkit.lightning.resume import checkpoints
from attnkit.lightning.resume.best_and_last import BestCheckpoint

_log = logging.getLogger(__name__)


def train(run: Run) -> dict[str, float]:
    """Train from the newest checkpoint or from the start, then test the best one."""
    trainer = run.make_trainer()  # first, so that errors there are found before data is read
    data = run.make_data()
    module = run.make_module()
    run.ready()
    if run.chosen and trainer.is_global_zero:
        words = (f"{key}={'null' if value is None else value}" for key, value in run.chosen.items())
        say(f"chosen for this data: {' '.join(words)}; give another value to change it")
    _log_run(run, {})
    _fit(run)
    figures = _of_epochs(trainer, measured(trainer))
    figures |= {"epochs": trainer.current_epoch, "steps": trainer.global_step}
    figures |= {"parameters": run.num_parameters}
    run.save(figures)  # in case the test fails
    run.ended_by = ended_by(trainer)
    if run.ended_by == "max_epochs" and _minutes(run):
        run.ended_by = "minutes"
    if _has_test(module, data):
        run.loaded(trainer.test, ckpt_path=run.best, verbose=False)
        figures |= measured(trainer)
    _log_run(run, {k: v for k, v in figures.items() if k.startswith("test/") or "_best" in k})
    return figures


def _minutes(run: Run) -> float | None:
    """Return `trainer.minutes`, which decides the number of epochs."""
    return (run.config.get("trainer") or {}).get("minutes")


def _log_run(run: Run, figures: dict[str, float]) -> None:
    for logger in run.trainer.loggers:
        if isinstance(logger, TensorBoard):
            logger.log_run(run.config, figures)


def _of_epochs(trainer: Trainer, figures: dict[str, float]) -> dict[str, float]:
    """Add validation metrics under the names `_last` and `_best`.

    `_last` is the last epoch, `_best` the epoch of the best checkpoint.
    """
    last = {f"{name}_last": v for name, v in figures.items() if name.startswith("val/")}
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    candidates = [c.best for kind in (BestCheckpoint, EpochLines) for c in callbacks
                  if isinstance(c, kind) and c.best]  # fmt: skip
    best = candidates[0] if candidates else {}
    of_best = {
        f"{name}_best": value
        for name, value in best.items()
        if name not in ("epoch", "step") and math.isfinite(value)
    }
    epoch = {"best_epoch": best["epoch"]} if best else {}
    return figures | last | of_best | epoch


def ended_by(trainer: Trainer) -> str:
    """Return the argument of the trainer that ended a training, or else "callback"."""
    if 0 < trainer.max_steps <= trainer.global_step:
        return "max_steps"
    # Lightning counts an epoch as done although it was stopped within it
    within_epoch = trainer.should_stop and not epoch_ends(trainer)
    if 0 < (trainer.max_epochs or -1) <= trainer.current_epoch and not within_epoch:
        return "max_epochs"
    timers = [c for c in trainer.callbacks if isinstance(c, Timer)]  # type: ignore[attr-defined]
    if any((timer.time_remaining() or 0) < 0 for timer in timers):
        return "max_time"
    return "callback"


def _fit(run: Run) -> None:
    for error in run.newest.broken:
        rank_zero_warn(f"{error}; going on from {run.start}")
    _ask_for_no_less(run)
    try:
        run.loaded(run.trainer.fit, ckpt_path=run.start)
    except Exception as error:
        if not is_out_of_memory(error) or not _may_shrink(run):
            raise
        raise OutOfMemory(allocator_message(error)) from error
    if run.trainer.interrupted:
        raise KeyboardInterrupt


def _ask_for_no_less(run: Run) -> None:
    """Raise max_epochs to the epochs that the run has already; Lightning refuses smaller values."""
    trainer = run.trainer
    asked = -1 if _minutes(run) else trainer.max_epochs or -1
    done = checkpoints.load(run.start, mmap=True)["epoch"] if run.start else 0
    if 0 <= asked < done:
        _log.info(f"trainer.max_epochs={asked}: the run has {done} already; it trains no more")
        trainer.fit_loop.max_epochs = done


def _may_shrink(run: Run) -> bool:
    """Return whether smaller batches can be accumulated; with manual optimization they can't."""
    callbacks = run.trainer.callbacks  # type: ignore[attr-defined]
    scheduled = any(isinstance(c, GradientAccumulationScheduler) for c in callbacks)
    wanted = (run.config.get("trainer") or {}).get("oom_retry", True)
    return wanted and run.module.automatic_optimization and not scheduled


def _has_test(module: LightningModule, data: LightningDataModule) -> bool:
    return (
        type(module).test_step is not LightningModule.test_step
        and type(data).test_dataloader is not LightningDataModule.test_dataloader
    )
