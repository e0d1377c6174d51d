"""Exact resuming: a stopped training ends like an uninterrupted one."""

import random
import warnings
from typing import Any, cast

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import DataLoader
from torchmetrics import Metric

from attnkit.lightning import _private as private
from attnkit.lightning.resume.sampler import ResumableSampler


class ExactResume(Callback):
    """Makes a resumed run end with the weights, to the bit, of a run that was never stopped.

    Lightning's checkpoints hold the weights, the optimizer and the counters. This callback adds,
    for every process: the random states of Python, NumPy, torch and the GPU; the place in the
    training data, which is restored by fetching the batches before it, or, with a
    `ResumableSampler`, by their numbers alone; and what `self.log` and the module's metrics have
    summed over the epoch.

    Checkpoints must come from the end of an optimizer step or of an epoch, as those of
    `SaveOnSignal` and `ModelCheckpoint` do. Put this callback after others that draw random numbers
    in `on_train_start`.

    Training data are shuffled by a generator of their own, seeded from torch's at the start, if a
    `DataLoader` was given none. Loaders with a `state_dict` of their own are left alone. Not
    restored are unknown generators (`np.random.default_rng()` inside a dataset that is read without
    workers), and cuDNN's choices where they are not deterministic. With another number of processes
    a run continues with a warning, but not exactly. With batches of another size it continues at
    the same sample.
    """

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None
        self._sums: dict[str, dict[str, Tensor]] = {}
        self._generators: list[Tensor | None] = []
        self._epoch = -1

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        loaders = private.train_loaders(trainer)
        mine = {
            "random": _random_states(trainer),
            # for the current epoch, and for the next one
            "generators": [self._generators, [_own_generator(x) for x in loaders]],
            "seeds": [getattr(_sampler(x), "seed", None) for x in loaders],
            "batch_sizes": _batch_sizes(trainer),
            "metrics": _metric_states(pl_module),
            "sums": _epoch_sums(trainer),
            "monitored": _monitored(trainer),
        }
        checkpoint["exact_resume"] = _gathered(mine)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            return
        saved = checkpoint.get("exact_resume")
        if saved is None:
            rank_zero_warn("the checkpoint was saved without ExactResume: not exact from here on")
        elif len(saved) != trainer.world_size:
            rank_zero_warn(
                f"the checkpoint comes from {len(saved)} processes, these are "
                f"{trainer.world_size}: not exact from here on"
            )
        else:
            self._saved = saved[trainer.global_rank]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        saved, self._saved = self._saved, None
        loop: Any = trainer.fit_loop
        # for Lightning an epoch saved after its last batch is over, and its end is skipped
        epochs = loop.epoch_progress.total
        is_over = loop.restarted_mid_epoch and epochs.processed == epochs.started
        middle = saved is not None and loop.restarted_mid_epoch and not is_over
        if saved is not None and middle:
            _count_again(trainer, saved["batch_sizes"])
            # Lightning can't know that they are resumable.
            warnings.filterwarnings("ignore", ".*your dataloader is not resumable.*")
        self._start_data(trainer, saved, middle)
        if saved is not None:
            _set_random_states(trainer, saved["random"])
            _catch_up(trainer, saved["monitored"])
            if middle:
                _set_metric_states(pl_module, saved["metrics"])
                self._sums = saved["sums"]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop: Any = trainer.fit_loop
        epoch = loop.epoch_progress.current.processed
        if epoch != self._epoch:
            self._epoch = epoch
            self._generators = [_own_generator(loader) for loader in private.train_loaders(trainer)]

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        sums, self._sums = self._sums, {}
        for name, states in sums.items():
            _add_epoch_sum(trainer, name, states)

    def _start_data(self, trainer: Trainer, saved: dict[str, Any] | None, middle: bool) -> None:
        """Start the epoch's data again: Lightning has started them in the first epoch's order.

        Worker processes, if there are any, have then fetched the first batches.
        """
        loop: Any = trainer.fit_loop
        loaders = private.train_loaders(trainer)
        by_number = all(isinstance(_sampler(loader), ResumableSampler) for loader in loaders)
        have_states = any(hasattr(loader, "state_dict") for loader in loaders)
        if have_states or (by_number and saved is None):
            return
        seen = loop.epoch_loop.batch_progress.current.ready if middle else 0
        self._epoch = loop.epoch_progress.current.processed
        for loader, seed in zip(loaders, saved["seeds"] if saved else [], strict=False):
            if seed is not None:
                _sampler(loader).seed = seed
        for loader in loaders:
            private.set_sampler_epoch(loader, self._epoch)
            _own_generator(loader)
            if by_number:
                _sampler(loader).start = seen * loader.batch_size
        generators = saved["generators"][not middle] if saved else []
        for loader, state in zip(loaders, generators, strict=False):
            if state is not None:
                loader.generator.set_state(state)
        self._generators = [_own_generator(loader) for loader in loaders]
        fetcher = private.train_fetcher(trainer)
        iter(fetcher)
        if not by_number:
            for _ in range(seen):
                next(fetcher)
            fetcher.fetched = 0  # Lightning itself adds the batches seen
            fetcher.done = False


def _batch_sizes(trainer: Trainer) -> list[int | None]:
    return [getattr(loader, "batch_size", None) for loader in private.train_loaders(trainer)]


def _count_again(trainer: Trainer, before: list[int | None]) -> None:
    """Convert the number of batches of this epoch so far to another batch size, by samples."""
    now = _batch_sizes(trainer)
    if not before or not before[0] or not now[0] or before[0] == now[0]:
        return
    progress = trainer.fit_loop.epoch_loop.batch_progress
    seen = progress.current.ready
    further = seen * before[0] // now[0] - seen
    for count in (progress.current, progress.total):
        for name in ("ready", "started", "processed", "completed"):
            setattr(count, name, getattr(count, name) + further)


def _sampler(loader: Any) -> Any:
    return getattr(loader, "sampler", None)


def _own_generator(loader: Any) -> Tensor | None:
    """Return the state of the loader's generator, which is created if it has none."""
    if not isinstance(loader, DataLoader):
        return None
    if loader.generator is None:
        loader.generator = torch.Generator().manual_seed(torch.initial_seed())
    sampler = _sampler(loader)
    if getattr(sampler, "generator", loader) is None:  # a random sampler that draws from torch's
        sampler.generator = loader.generator
    return loader.generator.get_state()


def _random_states(trainer: Trainer) -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    name, keys, *rest = cast("tuple[Any, ...]", np.random.get_state(legacy=True))
    states: dict[str, Any] = {
        "python": [version, torch.tensor(numbers), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    device = trainer.strategy.root_device
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(*_if_many(device))
    return states


def _set_random_states(trainer: Trainer, states: dict[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    device = trainer.strategy.root_device
    if device.type != "cpu" and "device" in states:
        module = torch.get_device_module(device)
        module.set_rng_state(states["device"].cpu(), *_if_many(device))


def _if_many(device: torch.device) -> list[torch.device]:
    return [] if device.type == "mps" else [device]  # MPS has one device, and no argument for it


def _metrics(pl_module: LightningModule) -> dict[str, Metric]:
    return {name: m for name, m in pl_module.named_modules() if isinstance(m, Metric)}


def _metric_states(pl_module: LightningModule) -> dict[str, Any]:
    return {
        name: {"updates": metric.update_count, "state": dict(metric.metric_state)}
        for name, metric in _metrics(pl_module).items()
        if metric.update_count
    }


def _set_metric_states(pl_module: LightningModule, saved: dict[str, Any]) -> None:
    metrics = _metrics(pl_module)
    for name, values in saved.items():
        if (metric := metrics.get(name)) is not None:
            for key, value in values["state"].items():
                moved = value.to(metric.device) if isinstance(value, Tensor) else value
                setattr(metric, key, moved)
            private.set_num_updates(metric, values["updates"])


def _monitored(trainer: Trainer) -> dict[str, float]:
    """Return the value of each metric that a schedule monitors, such as `Plateau`'s."""
    names = {str(c.monitor) for c in trainer.lr_scheduler_configs if c.reduce_on_plateau}
    values = trainer.callback_metrics
    return {name: float(values[name]) for name in names if name in values}


def _catch_up(trainer: Trainer, values: dict[str, float]) -> None:
    """Make the missing step of such a schedule at the end of the checkpoint's epoch.

    Lightning makes it only after saving the checkpoint of an epoch.
    """
    for config in trainer.lr_scheduler_configs:
        if not config.reduce_on_plateau or config.interval != "epoch":
            continue
        scheduler: Any = config.scheduler
        is_behind = scheduler.last_epoch < trainer.current_epoch // config.frequency
        if is_behind and config.monitor in values:
            scheduler.step(values[config.monitor])


def _epoch_sums(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Return what `self.log` has summed up of numbers in this epoch."""
    return {
        name: {key: getattr(result, key) for key in states}
        for name, result, states in private.epoch_sums(trainer)
        if result.is_tensor and result.meta.on_epoch and not result.has_reset
    }


def _add_epoch_sum(trainer: Trainer, name: str, states: dict[str, Tensor]) -> None:
    result = next((sum_ for known, sum_, _ in private.epoch_sums(trainer) if known == name), None)
    if result is None:
        return
    for key, value in states.items():
        merge: Any = torch.add
        if result.meta.is_max_reduction or result.meta.is_min_reduction:
            merge = torch.maximum if result.meta.is_max_reduction else torch.minimum
        setattr(result, key, merge(getattr(result, key), value.to(getattr(result, key).device)))


def _gathered(mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the values of all processes, in the order of their ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
