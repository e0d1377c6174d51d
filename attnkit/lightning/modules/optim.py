"""Optimizers: weight decay by parameter, learning rates of layers and head, and Muon."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from torch import nn
from torch.optim import Optimizer

from attnkit.core.arguments import at_least, choice
from attnkit.finetune.record import finetuned, is_below

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
    from attnkit.finetune.order import head_of, layer_numbers

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
