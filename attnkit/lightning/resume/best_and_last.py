"""The checkpoint of the best validation, with which a run is tested and used, and that of the last
epoch, from which it is resumed. With short epochs, as on small graphs, neither is written after
every epoch."""

import copy
import math
import os
import shutil
import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection

from attnkit.lightning import _private as private
from attnkit.lightning.best import LOSS, Mode, mode_for, rank, validation
from attnkit.lightning.files import replacing
from attnkit.lightning.resume.checkpoints import CheckpointError, load

HELD = 2**26  # most bytes of a checkpoint that are held in memory


class _Paced(ModelCheckpoint):
    """A `ModelCheckpoint` that notes when it last wrote."""

    def __init__(self, every_seconds: float = 5.0, **kwargs: Any) -> None:
        if every_seconds < 0:
            raise ValueError(f"every_seconds: expected at least 0, got {every_seconds}")
        super().__init__(**kwargs)
        self.every_seconds = every_seconds
        self._written = "", -float("inf")
        """The file that was written last, and the time."""

    def _is_recent(self) -> bool:
        return time.monotonic() - self._written[1] < self.every_seconds

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self._written = filepath, time.monotonic()


class BestCheckpoint(_Paced):
    """`ModelCheckpoint` of the best validation, whose file always holds the best epoch.

    The best epoch has the best `monitor`; ties go to the smallest `val/loss`, then to the first.
    NaN is worse than any number. A warning at the end reports a metric that was the same in every
    epoch, or NaN.

    With `save_top_k` other than 1, a `filename` without `{…}`, such as "best", is that of the best
    alone; the others are called `best-epoch=3-step=120`, with epochs counted from 1. A folder that
    was moved or copied keeps its best: files are identified by their names, and a file that does
    not hold the step noted for it is ignored.

    A checkpoint that would replace one of less than `every_seconds` ago is held in memory. It is
    written when that time has passed, before any other checkpoint, and when training ends, also by
    an error. The file on the disk is thus never behind what another checkpoint notes as the best.
    Large checkpoints, those of several processes, and several files are written at once.

    Args:
        every_seconds: 0 writes every improvement.
        mode: "min" or "max"; None: known by the metric's name (`val/loss`, `val/accuracy`, …).
        kwargs: arguments of Lightning's class.

    Raises:
        ValueError: no mode is given, and the metric is unknown.
    """

    def __init__(
        self, every_seconds: float = 5.0, *, mode: Mode | None = None, **kwargs: Any
    ) -> None:
        monitor = kwargs.get("monitor")
        mode = mode_for(monitor, mode) if monitor else mode or "min"
        super().__init__(every_seconds, mode=mode, **kwargs)
        self.kept: dict[str, dict[str, float]] = {}
        """The validation of each file: `epoch`, from 1, `step`, and its metrics."""
        self._seen: list[float] = []
        """The metric's least and largest value, and the number of values without and with NaN."""
        self._held: tuple[dict[str, Any], str] | None = None

    @property
    def best(self) -> dict[str, float]:
        """The best validation so far: `epoch`, counted from 1, `step`, and its metrics."""
        return self.kept.get(self.best_model_path, {})

    # --- which ones are kept ---

    def _save_monitor_checkpoint(
        self, trainer: Trainer, monitor_candidates: dict[str, torch.Tensor]
    ) -> None:
        monitor = str(self.monitor)
        if monitor not in monitor_candidates:
            return
        figures = validation(trainer.callback_metrics, monitor)
        figures |= {"epoch": trainer.current_epoch + 1, "step": trainer.global_step}
        if trainer.world_size > 1:
            figures = trainer.strategy.broadcast(figures)
        self._look(figures[monitor])
        dropped = ""
        if 0 < self.save_top_k <= len(self.kept):
            dropped = max(self.kept, key=lambda path: (self._rank(path), self.kept[path]["step"]))
            if rank(figures, monitor, self.mode) >= self._rank(dropped):
                return
        is_best = not self.kept or rank(figures, monitor, self.mode) < self._rank(self._first())
        replaced = self.best_model_path if self._is_name else dropped
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, replaced)
        if dropped:
            del self.kept[dropped]
        if self._is_name and is_best and path in self.kept:
            self._move_aside(trainer, path)
        elif path in self.kept or (self._is_name and not is_best):
            path = self._beside(path, figures)
        self.kept[path] = figures
        self._tell_lightning(path)
        if self.verbose:
            rank_zero_info(f"{monitor} {figures[monitor]:.5g}: saving {path}")
        self._save_checkpoint(trainer, path)
        if dropped and self._should_remove_checkpoint(trainer, dropped, path):
            self._remove_checkpoint(trainer, dropped)

    @property
    def _is_name(self) -> bool:
        """Whether every epoch would have the same name."""
        return self.filename is not None and "{" not in self.filename

    def _rank(self, path: str) -> tuple[float, float]:
        return rank(self.kept[path], str(self.monitor), self.mode)

    def _first(self) -> str:
        """Return the best file; the earliest of equal ones."""
        return min(self.kept, key=lambda path: (self._rank(path), self.kept[path]["step"]))

    def _beside(self, path: str, figures: Mapping[str, float]) -> str:
        """Return the name of a file that is not the best."""
        stem, _, ending = path.rpartition(".")
        return f"{stem}-epoch={figures['epoch']:.0f}-step={figures['step']:.0f}.{ending}"

    def _move_aside(self, trainer: Trainer, path: str) -> None:
        """Give the best so far a name of its own; its file stays until the new one replaces it."""
        figures = self.kept.pop(path)
        aside = self._beside(path, figures)
        self.kept[aside] = figures
        if trainer.is_global_zero:
            if os.path.isdir(path):  # a folder of shards
                os.replace(path, aside)
            else:
                with open(path, "rb") as old, replacing(aside) as new:
                    shutil.copyfileobj(old, new)
        trainer.strategy.barrier()

    def _tell_lightning(self, path: str = "") -> None:
        """Set the attributes of `ModelCheckpoint` by what is kept."""
        scores = {p: torch.tensor(f[str(self.monitor)]) for p, f in self.kept.items()}
        worst = max(self.kept, key=self._rank, default="")
        self.best_k_models = scores
        self.kth_best_model_path, self.kth_value = worst, scores.get(worst, self.kth_value)
        self.best_model_path = self._first() if self.kept else ""
        self.best_model_score = scores.get(self.best_model_path)
        self.current_score = scores.get(path)

    # --- metrics that do not tell epochs apart ---

    def _look(self, value: float) -> None:
        least, most, numbers, count = self._seen or (math.inf, -math.inf, 0, 0)
        if not math.isnan(value):
            least, most, numbers = min(least, value), max(most, value), numbers + 1
        self._seen = [least, most, numbers, count + 1]

    def _warn_if_constant(self, trainer: Trainer) -> None:
        is_trial: Any = trainer.fast_dev_run  # type: ignore[attr-defined]
        if not self._seen and self.monitor and self.save_top_k and not is_trial:
            rank_zero_warn(
                f"callbacks: {type(self).__name__}: {self.monitor} was never logged: no epoch is "
                "the best, and no checkpoint of it was written"
            )
        least, most, numbers, count = self._seen or (0, 0, 0, 0)
        if count > 1 and (numbers == 0 or (numbers == count and least == most)):
            how = f"by {LOSS}" if LOSS in self.best and self.monitor != LOSS else "as the first"
            rank_zero_warn(
                f"callbacks: {type(self).__name__}: {self.monitor} was "
                f"{f'{least:g}' if numbers else 'NaN'} in all {count} validations, so that it "
                f"can't tell which is the best; chosen {how}: epoch "
                f"{self.best.get('epoch', math.nan):.0f}"
            )

    # --- going on ---

    def state_dict(self) -> dict[str, Any]:
        kept = {os.path.basename(path): figures for path, figures in self.kept.items()}
        return {**super().state_dict(), "kept": kept, "seen": list(self._seen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = {self._here(name): figures for name, figures in state_dict["kept"].items()}
        self._seen = list(state_dict["seen"])
        self.last_model_path = self._here(state_dict["last_model_path"])
        if self.monitor is None:
            self.best_model_path = self._here(state_dict["best_model_path"])
        else:
            self._tell_lightning()

    def _here(self, path: str) -> str:
        """Return the path of a file of this name in the current folder."""
        return os.path.join(self.dirpath or "", os.path.basename(path)) if path else ""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """When a run is resumed, keep only the files that are still there."""
        if not self.kept:
            return
        best, found = self.best_model_path, self.kept
        if trainer.is_global_zero:
            held = {path: _held_by(path, f, self.state_key) for path, f in found.items()}
            found = {path: figures for path, figures in held.items() if figures is not None}
        self.kept = trainer.strategy.broadcast(found)
        if best not in self.kept:
            rank_zero_warn(
                f"{best}: not there or not as it was noted, so that the best of the epochs before "
                "is no longer known"
            )
            if self.kept and self._is_name:
                self._move_up(trainer, best)
        self._tell_lightning()

    def _move_up(self, trainer: Trainer, path: str) -> None:
        """Give the best of the files that are left the name of the best."""
        first = self._first()
        self.kept[path] = self.kept.pop(first)
        if trainer.is_global_zero:
            os.replace(first, path)
        trainer.strategy.barrier()

    # --- when it is written ---

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, *args, **kwargs)
        if not self._is_recent():
            self._write(trainer)

    def on_save_checkpoint(self, trainer: Trainer, *args: Any) -> None:
        self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)
        self._warn_if_constant(trainer)
        super().on_train_end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, *args: Any) -> None:
        self._write(trainer)
        super().on_exception(trainer, *args)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        is_again = filepath == self._written[0]
        if is_again:
            self._held = None  # the new checkpoint replaces the held one
        if is_again and self._is_recent() and self._may_hold(trainer):
            checkpoint = private.dump(trainer, bool(self.save_weights_only))
            copies: dict[int, Any] = {}  # deepcopy refuses tensors inside an autograd graph
            apply_to_collection(
                checkpoint, torch.Tensor, lambda t: copies.setdefault(id(t), t.detach().clone())
            )
            self._held = copy.deepcopy(checkpoint, copies), filepath
            private.note_saved(self, trainer.global_step, filepath)
        else:
            super()._save_checkpoint(trainer, filepath)

    def _may_hold(self, trainer: Trainer) -> bool:
        if self.save_top_k != 1 or trainer.world_size > 1:
            return False  # with several files, a replaced one gets another name
        size = sum(p.nbytes for p in trainer.lightning_module.parameters())
        return 4 * size < HELD  # optimizers keep up to three times as much

    def _write(self, trainer: Trainer) -> None:
        if self._held is not None:
            (checkpoint, filepath), self._held = self._held, None
            trainer.strategy.save_checkpoint(checkpoint, filepath)
            self._written = filepath, time.monotonic()
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)


class LastCheckpoint(_Paced):
    """`ModelCheckpoint` that saves the run after an epoch, at most once every few seconds.

    It saves at the end of the last epoch, and of others if `every_seconds` have passed since the
    last time. A killed run repeats these seconds; on Ctrl-C and SIGTERM, `SaveOnSignal` saves. It
    also saves if `max_steps`, `max_time` or a callback ends the training within an epoch, so that
    it can be resumed there.

    Args:
        every_seconds: 0 saves after every epoch.
        kwargs: arguments of Lightning's class.
    """

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, *args, **kwargs)
        if (
            private.stops_now(trainer)
            and not private.epoch_ends(trainer)
            and not private.is_accumulating(trainer)
            and not self._should_skip_saving_checkpoint(trainer)
        ):
            # not at the end of the epoch, which would count as trained; Lightning then saves no
            # more at this step
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_due(trainer):
            super().on_train_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_due(trainer):
            super().on_validation_end(trainer, pl_module)

    def _is_due(self, trainer: Trainer) -> bool:
        """Whether to save now, the same in all processes."""
        steps, epochs = trainer.max_steps, trainer.max_epochs
        if (
            trainer.should_stop
            or 0 <= steps <= trainer.global_step
            or (epochs is not None and 0 <= epochs <= trainer.current_epoch + 1)
        ):
            return True
        is_due = not self._is_recent()
        return trainer.strategy.broadcast(is_due) if trainer.world_size > 1 else is_due


def _held_by(path: str, noted: dict[str, float], key: str) -> dict[str, float] | None:
    """Return the figures of the checkpoint in a file, which may be later than the noted ones.

    None: the file is gone, or nothing is known of its content.

    Args:
        key: key of the callback's state in the file.
    """
    if os.path.isdir(path):  # a folder of shards
        return noted
    try:
        checkpoint = load(path, mmap=True)
    except CheckpointError:
        return None
    step = checkpoint.get("global_step", -1)
    own = checkpoint.get("callbacks", {}).get(key, {}).get("kept", {}).values()
    if found := next((figures for figures in own if figures["step"] == step), None):
        return dict(found)
    return noted if noted["step"] == step else None
