"""Every private name of torch, torchmetrics and Lightning that attnkit uses outside of its core.

They may change with any release: pyproject.toml bounds the versions, and a test asserts that each
exists. Each entry says why no public name serves.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import Any

from lightning import LightningModule, Trainer
from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch import Tensor, nn
from torch._utils import ExceptionWrapper
from torch.utils._pytree import tree_leaves
from torch.utils.data._utils.worker import _worker_loop
from torchmetrics import Metric

# The tensors of a nested batch: torch has no public name for it.
leaves: Callable[[Any], list[Any]] = tree_leaves
# Sets the sampler's epoch for a loader of any kind, also in its batch sampler.
set_sampler_epoch = _set_sampler_epoch
# A subclass overrides `_check_log_dir_exists`, which deletes metrics.csv when a run is resumed.
ExperimentWriter = _ExperimentWriter


# --- torch and torchmetrics -----------------------------------------------------------------------


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def is_data_worker() -> bool:
    """Whether a `DataLoader` started this process; `get_worker_info` knows it only after a signal
    may already have come."""
    return getattr(multiprocessing.current_process(), "_target", None) is _worker_loop


def report_lost_batches() -> None:
    """Make a batch that a data worker cannot send an error of the loader from now on.

    Python's queue prints the reason, most often full shared memory, and drops the batch; the loader
    then waits for it forever (pytorch#1355).
    """
    queues: Any = Queue
    report = queues._on_queue_feeder_error

    def failed(queue: Any, error: Exception, item: Any) -> None:
        if is_data_worker() and isinstance(item, tuple) and len(item) == 2:
            queue.put((item[0], ExceptionWrapper(where="in DataLoader worker process")))
        else:
            report(error, item)

    if isinstance(vars(Queue)["_on_queue_feeder_error"], staticmethod):  # not replaced yet
        queues._on_queue_feeder_error = failed


def set_num_updates(metric: Metric, count: int) -> None:
    """Mark a metric as updated `count` times, not computed since; publicly this is read-only."""
    metric._update_count, metric._computed = count, None


# --- Lightning ------------------------------------------------------------------------------------


def note_saved(callback: ModelCheckpoint, step: int, path: str) -> None:
    """Record a saved checkpoint as `ModelCheckpoint` itself does."""
    callback._last_global_step_saved, callback._last_checkpoint_saved = step, path


def dump(trainer: Trainer, weights_only: bool) -> dict[str, Any]:
    """Return what `trainer.save_checkpoint` would write; its tensors are those that training
    continues to use."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only)


def log_again(module: LightningModule, name: str, value: Metric | Tensor) -> bool:
    """Repeat what `module.log(name, value)` did before in the same hook; return whether it did.

    The value is a metric, or a tensor that `reduce_fx` sums. `log` copies all that it knows of the
    value at every call, which takes 0.4 ms.
    """
    trainer, hook = module._trainer, module._current_fx_name
    results = None if trainer is None else trainer._results
    if trainer is None or results is None or hook is None:
        return False
    key = f"{hook}.{name}"
    if results.dataloader_idx is not None:
        key += f".{results.dataloader_idx}"
    known = results.get(key)
    if known is None or (known.value is not value and not known.is_tensor):
        return False
    results.update_metrics(key, value, 1)
    trainer._logger_connector._current_fx = hook  # or the hook's next log would reset its values
    return True


def starts_processes(trainer: Trainer) -> bool:
    """Whether `fit` would start the other ranks from this process, as DDP does without torchrun."""
    launcher = trainer.strategy.launcher
    return (
        isinstance(launcher, _SubprocessScriptLauncher)
        and not launcher.cluster_environment.creates_processes_externally
    )


def set_timeout(trainer: Trainer, timeout: timedelta) -> None:
    """Set the timeout of the strategy's collectives, which Trainer has no argument for."""
    if hasattr(trainer.strategy, "_timeout"):
        trainer.strategy._timeout = timeout


def replace_signal_handling(trainer: Trainer, with_: Callable[[], None]) -> None:
    """Replace Lightning's signal handlers, which every fit installs and no option turns off."""
    trainer._signal_connector.register_signal_handlers = with_  # type: ignore[method-assign]


def is_accumulating(trainer: Trainer) -> bool:
    """Whether no optimizer step followed the batch that has just ended."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def epoch_ends(trainer: Trainer) -> bool:
    """Whether the batch that has just ended is the last of its epoch."""
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def stops_now(trainer: Trainer) -> bool:
    """Whether training ends with the batch that has just ended, by max_steps or by a callback."""
    is_over = 0 <= trainer.max_steps <= trainer.global_step
    return is_over or (trainer.should_stop and trainer.fit_loop._can_stop_early)


def validation_is_next(trainer: Trainer) -> bool:
    """Whether validation follows the batch that has just ended."""
    loop: Any = trainer.fit_loop
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def set_num_batches(trainer: Trainer, count: int) -> None:
    """End this epoch and later ones after `count` batches; `limit_train_batches` is only read when
    the loaders are set up."""
    loop: Any = trainer.fit_loop
    loop.max_batches = loop._data_fetcher.length = loop._combined_loader.limits = count
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(count * trainer.val_check_interval))


def train_fetcher(trainer: Trainer) -> Any:
    """Return the fetcher of training batches, which is restarted when a run is resumed."""
    return trainer.fit_loop._data_fetcher


def train_loaders(trainer: Trainer) -> list[Any]:
    """Return the training loaders in use; `trainer.train_dataloader` has them nested."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined.flattened


def epoch_sums(trainer: Trainer) -> Iterator[tuple[str, Any, Iterable[str]]]:
    """Yield what `self.log` sums over the epoch: name, the sum as a metric, its states' names."""
    for name, result in trainer.fit_loop.epoch_loop._results.items():
        yield name, result, result._defaults


def logged_metrics(trainer: Trainer) -> dict[str, Any]:
    """Return the torchmetrics that the ending validation has logged, by name."""
    results = trainer.fit_loop.epoch_loop.val_loop._results
    return {r.meta.name: r.value for r in results.values() if not r.is_tensor}


class BarFromOne(RichProgressBar):
    """A progress bar that counts epochs from 1 and disappears when it stops; nothing public can do
    either."""

    def _init_progress(self, trainer: Trainer) -> None:
        super()._init_progress(trainer)
        if self.progress is not None:
            self.progress.live.transient = True

    def _get_train_description(self, current_epoch: int) -> str:
        last = f"/{self.trainer.max_epochs}" if (self.trainer.max_epochs or -1) > 0 else ""
        # as wide as "Validation", or the bar would jump
        return f"{f'Epoch {current_epoch + 1}{last}':{len(self.validation_description)}}"


def wandb_arguments(logger: WandbLogger) -> dict[str, Any]:
    """Return the arguments of `wandb.init`, of which the constructor takes only some."""
    return logger._wandb_init
