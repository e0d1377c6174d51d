"""Learning-rate schedules: a warm-up and a decay, or a drop when a metric stops improving."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from attnkit.core.arguments import at_least, share, up_to_1
from attnkit.lightning.best import Mode, mode_for


def warmup_cosine(
    optimizer: Optimizer,
    *,
    total_steps: int,
    steps_per_epoch: int | None = None,
    warmup_fraction: float = 0.05,
    warmup_epochs: float | None = None,
    warmup_steps: int | None = None,
    min_lr_fraction: float = 0.01,
) -> LRScheduler:
    """Linear warm-up, then half a cosine down to `min_lr_fraction` of each group's learning rate.

    Step it once per optimizer step. With W steps of warm-up, step t < W uses
    (t + 1) / (W + 1) of the learning rate, step t ≥ W uses m + (1 - m)(1 + cos πp) / 2 with
    p = (t - W) / (total_steps - W). Cosine: Loshchilov and Hutter, SGDR, 2017, without restarts.

    Unlike torch's `SequentialLR` of `LinearLR` and `CosineAnnealingLR`, whose floor is one absolute
    learning rate, the floor is relative, so groups with different learning rates keep their ratio.

    Args:
        optimizer: optimizer whose learning rates are scaled.
        total_steps: optimizer steps in the whole run.
        steps_per_epoch: optimizer steps in an epoch; `warmup_epochs` needs it.
        warmup_fraction: share of the steps spent warming up, in [0, 1).
        warmup_epochs: epochs spent warming up, in place of the share.
        warmup_steps: steps spent warming up, in place of the share.
        min_lr_fraction: learning rate at the end, relative to the highest, in [0, 1].
    """
    up_to_1(min_lr_fraction=min_lr_fraction)
    warmup = _warmup(total_steps, steps_per_epoch, warmup_fraction, warmup_epochs, warmup_steps)

    def after(step: int) -> float:
        cosine = (1 + math.cos(math.pi * _progress(step, warmup, total_steps))) / 2
        return min_lr_fraction + (1 - min_lr_fraction) * cosine

    return _warmed(optimizer, warmup, after)


def warmup_polynomial(
    optimizer: Optimizer,
    *,
    total_steps: int,
    steps_per_epoch: int | None = None,
    warmup_fraction: float = 0.05,
    warmup_epochs: float | None = None,
    warmup_steps: int | None = None,
    power: float = 1.0,
    min_lr_fraction: float = 0.0,
) -> LRScheduler:
    """Linear warm-up, then m + (1 - m)(1 - p)^power, p from 0 to 1; a straight line with power 1.

    Args:
        optimizer: optimizer whose learning rates are scaled.
        power: 0 leaves the learning rate as it is after the warm-up.
        min_lr_fraction: m, the learning rate at the end, relative to the highest, in [0, 1].

    The other arguments are those of `warmup_cosine`.
    """
    at_least(0, power=power)
    up_to_1(min_lr_fraction=min_lr_fraction)
    warmup = _warmup(total_steps, steps_per_epoch, warmup_fraction, warmup_epochs, warmup_steps)

    def after(step: int) -> float:
        left = (1 - _progress(step, warmup, total_steps)) ** power
        return min_lr_fraction + (1 - min_lr_fraction) * left

    return _warmed(optimizer, warmup, after)


def warmup_step(
    optimizer: Optimizer,
    *,
    total_steps: int,
    steps_per_epoch: int,
    warmup_fraction: float = 0.0,
    warmup_epochs: float | None = None,
    warmup_steps: int | None = None,
    gamma: float = 0.1,
    every_epochs: float | None = None,
    at_epochs: Sequence[float] | None = None,
) -> LRScheduler:
    """Linear warm-up, then a factor `gamma` every `every_epochs` epochs, or after given epochs.

    Epochs are counted from the start of the run, the warm-up included, as by torch's `StepLR` and
    `MultiStepLR`.

    Args:
        optimizer: optimizer whose learning rates are scaled.
        gamma: factor of each step, in (0, 1].
        every_epochs: epochs from one step to the next; 30 if neither is given.
        at_epochs: epochs after which there is a step, in place of `every_epochs`.

    The other arguments are those of `warmup_cosine`.
    """
    up_to_1(gamma=gamma)
    if at_epochs is not None and every_epochs is not None:
        raise ValueError("at_epochs: replaces every_epochs; give only one of the two")
    if every_epochs is not None and every_epochs <= 0:
        raise ValueError(f"every_epochs: expected a number above 0, got {every_epochs}")
    warmup = _warmup(total_steps, steps_per_epoch, warmup_fraction, warmup_epochs, warmup_steps)

    def after(step: int) -> float:
        epochs = step / steps_per_epoch
        if at_epochs is None:
            return float(gamma ** int(epochs / (every_epochs or 30)))
        return float(gamma ** sum(epochs >= epoch for epoch in at_epochs))

    return _warmed(optimizer, warmup, after)


class Plateau(ReduceLROnPlateau):
    """torch's `ReduceLROnPlateau`, stepped once an epoch with the metric named `monitor`.

    Args:
        optimizer: optimizer whose learning rates are lowered.
        monitor: the name of the metric, as it is logged.
        mode: "min" if less of it is better, "max" if more is; None: known by its name.
        factor: factor of the learning rate if the metric has not improved for `patience` epochs.
        **options: further arguments of torch's class.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        monitor: str = "val/loss",
        mode: Mode | None = None,
        factor: float = 0.1,
        patience: int = 10,
        **options: Any,
    ) -> None:
        mode = mode_for(monitor, mode)
        super().__init__(optimizer, mode=mode, factor=factor, patience=patience, **options)
        self.monitor = monitor


def _warmup(
    total_steps: int,
    steps_per_epoch: int | None,
    fraction: float,
    epochs: float | None,
    steps: int | None,
) -> int:
    """Return the number of steps of the warm-up."""
    at_least(1, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    at_least(0, warmup_epochs=epochs, warmup_steps=steps)
    share(warmup_fraction=fraction)
    if epochs is not None and steps is not None:
        raise ValueError("warmup_steps: replaces warmup_epochs; give only one of the two")
    if steps is not None:
        return steps
    if epochs is None:
        return round(fraction * total_steps)
    if steps_per_epoch is None:
        raise ValueError("warmup_epochs: needs steps_per_epoch, which is None")
    return round(epochs * steps_per_epoch)


def _progress(step: int, warmup: int, total_steps: int) -> float:
    """Return the share of the steps after the warm-up that is done, from 0 to 1."""
    return min((step - warmup) / max(total_steps - warmup, 1), 1.0)


def _warmed(optimizer: Optimizer, warmup: int, after: Callable[[int], float]) -> LRScheduler:
    def factor(step: int) -> float:
        return (step + 1) / (warmup + 1) if step < warmup else after(step)

    return LambdaLR(optimizer, factor)
