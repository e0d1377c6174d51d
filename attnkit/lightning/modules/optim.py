"""Optimizers: weight decay by parameter, learning rates of layers and head, Muon; and schedules: a
warm-up and a decay, or a drop when a metric stops improving."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from attnkit.core.arguments import at_least, choice, share, up_to_1
from attnkit.finetune.layers import is_below
from attnkit.finetune.methods import finetuned
from attnkit.lightning.best import Mode, mode_for

Coefficients = Literal["original", "quintic", "polar_express", "polar_express_safer"]


def parameter_groups(
    module: nn.Module,
    weight_decay: float | None = None,
    *,
    layer_decay: float | None = None,
    head_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Return optimizer groups: parameters with and without weight decay, by learning rate.

    Vectors and scalars (biases, norms, layer scales) are not decayed, nor is what a submodule names
    in its `no_weight_decay()` (attnkit's and timm's models: positions, class token). Frozen
    parameters are left out; a shared parameter is listed once. There are two groups, or with layer
    decay two for each layer.

    Args:
        module: module whose parameters are grouped.
        weight_decay: weight decay of the first group; None leaves it to the optimizer's setting.
        layer_decay: ratio of a layer's learning rate to that of the next layer; the head has the
            optimizer's: see `attnkit.finetune.full`. Each group then has an `lr_scale`, by which
            `scale_learning_rates` multiplies. None: the value of the module's fine-tuning.
        head_lr: learning rate of the head; None: the value of the module's fine-tuning.
    """
    rate = _rates(module, layer_decay, head_lr)
    exempt: set[str] = set()
    for prefix, child in module.named_modules():
        names = getattr(child, "no_weight_decay", None)
        if callable(names):
            exempt.update(f"{prefix}.{name}" if prefix else name for name in names())

    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        rates = rate(name)
        is_free = parameter.ndim <= 1 or name in exempt
        key = (is_free, *rates.items())
        if key not in groups:
            decay = 0.0 if is_free else weight_decay
            settings = {} if decay is None else {"weight_decay": decay}
            groups[key] = {"params": [], **settings, **rates}
        groups[key]["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def scale_learning_rates(optimizer: Optimizer) -> Optimizer:
    """Multiply each group's learning rate by its `lr_scale`, if it has one; return the optimizer.

    Call it once, before a schedule is made. A `TaskModule` does.
    """
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * group.pop("lr_scale", 1.0)
    return optimizer


def _rates(
    module: nn.Module, layer_decay: float | None, head_lr: float | None
) -> Callable[[str], dict[str, float]]:
    """Return a function from a parameter's name to its learning rate or scale."""
    prefix, network, head = "", module, None
    if (found := finetuned(module)) is not None:
        prefix, network, record = found
        layer_decay = record.layer_decay if layer_decay is None else layer_decay
        head_lr = record.head_lr if head_lr is None else head_lr
        head = record.head
    if layer_decay is None and head_lr is None:
        return lambda name: {}
    from attnkit.finetune.layers import head_of, layer_numbers

    head = head or head_of(network)
    start = f"{prefix}." if prefix else ""
    numbers = {f"{start}{name}": n for name, n in layer_numbers(network, head).items()}
    heads = [f"{start}{name}" for name in head]
    last = max(numbers.values(), default=0)

    def rates(name: str) -> dict[str, float]:
        if head_lr is not None and is_below(name, heads):
            return {"lr": head_lr}
        below = last - numbers.get(name, last)
        return {} if layer_decay is None else {"lr_scale": layer_decay**below}

    return rates


def muon(
    groups: Sequence[dict[str, Any]],
    *,
    lr: float = 4e-3,
    weight_decay: float = 0.05,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    ns_coefficients: Coefficients = "original",
    betas: tuple[float, float] = (0.9, 0.98),
) -> Optimizer:
    """timm's Muon (Jordan et al. 2024) for matrices and convolutions, with AdamW for the rest.

    A step of Muon has singular values of about 1: it moves directions of small gradients as far as
    those of large ones, which shortens the plateaus before attention finds out where to look.
    AdamW gets what Muon cannot treat (vectors) and what does not map vectors to vectors: the group
    that `parameter_groups` does not decay, with embeddings and positions.

    Args:
        groups: groups of `parameter_groups`.
        lr, weight_decay: settings of both, as Muon's steps are scaled to the size of AdamW's.
        momentum: momentum of Muon.
        nesterov: whether both look ahead.
        ns_steps, ns_coefficients: settings of Newton and Schulz's iteration, as named in timm.
        betas: betas of AdamW.

    Raises:
        ValueError: a number out of its range, or unknown coefficients.
    """
    choice(get_args(Coefficients), ns_coefficients=ns_coefficients)
    at_least(1, ns_steps=ns_steps)
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas: expected two numbers in [0, 1), got {betas}")
    from timm.optim import Muon  # takes a second, only for this optimizer

    given = [{**group, "use_fallback": group.get("weight_decay") == 0.0} for group in groups]
    return Muon(
        given,
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
        ns_steps=ns_steps,
        ns_coefficients=ns_coefficients,
        betas=(betas[0], betas[1]),
    )


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
