"""Fine-tuning methods that train a part of a network's parameters, and the record of the method,
which is stored on the network."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from attnkit.core.arguments import at_least, positive
from attnkit.finetune.layers import head_of, is_below, layer_numbers


@dataclass(frozen=True)
class FineTuned:
    """How a network is fine-tuned; stored as `network.finetuned`.

    method: the name of the method that was applied.
    head: the names of the modules that count as its head.
    options: arguments of the method, as plain data.
    layer_decay, head_lr: settings of `attnkit.lightning.parameter_groups`.
    """

    method: str
    head: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    layer_decay: float | None = None
    head_lr: float | None = None


def note(network: nn.Module, record: FineTuned) -> None:
    """Store the record on the network."""
    network.finetuned = record  # type: ignore[assignment]


def finetuned(module: nn.Module) -> tuple[str, nn.Module, FineTuned] | None:
    """Return the fine-tuned network in a module: its name there, the network, and its record."""
    for name, child in module.named_modules():
        record = child.__dict__.get("finetuned")
        if isinstance(record, FineTuned):
            return name, child, record
    return None


def check_new(network: nn.Module) -> None:
    """Raise ValueError if it is already fine-tuned, TypeError if it is not a network."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(network).__name__}")
    if (found := finetuned(network)) is not None:
        raise ValueError(f"model: it is already fine-tuned, by {found[2].method}")


def train_only(network: nn.Module, chosen: Callable[[str], bool]) -> None:
    """Freeze all parameters except those whose names are chosen."""
    network.requires_grad_(False)
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if chosen(name):
            parameter.requires_grad_(True)


# --- evaluation mode of frozen modules ------------------------------------------------------------

_ALIKE = {nn.Linear, nn.LayerNorm, nn.Conv2d, nn.Embedding, nn.Identity}
"""Leaves that compute the same in training and evaluation."""


def keep_frozen_in_evaluation(network: nn.Module) -> None:
    """Keep modules before the first trained one, and later modules that are frozen as a whole, in
    evaluation mode: no dropout, no drop path, no running statistics."""
    trained_before = False
    for child in network.children():
        parameters = list(child.parameters())
        trained = any(parameter.requires_grad for parameter in parameters)
        if trained:
            keep_frozen_in_evaluation(child)
        elif parameters or not trained_before:
            _keep_in_evaluation(child)
        trained_before = trained_before or trained


def keep_batch_norms_in_evaluation(network: nn.Module) -> None:
    """Keep frozen batch norms in evaluation: running statistics are a part of the weights."""
    for module in network.modules():
        if isinstance(module, _BatchNorm) and not any(
            parameter.requires_grad for parameter in module.parameters()
        ):
            _keep_in_evaluation(module)


def _keep_in_evaluation(module: nn.Module) -> None:
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):  # may be iterated over
        module.eval()
        for child in module.children():
            _keep_in_evaluation(child)
    elif type(module) not in _ALIKE:
        module.eval()
        module.register_forward_pre_hook(_to_evaluation)


def _to_evaluation(module: nn.Module, inputs: Any) -> None:
    if module.training:  # train() was called on the whole network
        module.eval()


def full(
    model: nn.Module,
    *,
    layer_decay: float | None = None,
    head_lr: float | None = None,
    head: str | None = None,
) -> nn.Module:
    """Train all parameters.

    Args:
        model: the network; these settings are stored on it for `parameter_groups`.
        layer_decay: ratio of a layer's learning rate to that of the next layer (Clark et al.,
            ELECTRA, 2020; Bao et al., BEiT, 2021): the head has the optimizer's, the last block
            `layer_decay` times that, the one before `layer_decay`² …; None: all have the same.
        head_lr: learning rate of the head; None: the optimizer's.
        head: a glob for the names of the head's modules; None: timm's classifier, or the modules
            with a usual name.

    Returns:
        The model itself.

    Raises:
        ValueError: the model is fine-tuned already, a number is out of range, or no head is found.
    """
    check_new(model)
    check_rates(layer_decay, head_lr)
    found = head_of(model, head) if (layer_decay, head_lr, head) != (None, None, None) else ()
    note(model, FineTuned("full", found, {"head": head}, layer_decay, head_lr))
    return model


def head_only(model: nn.Module, *, cache: bool = True, head: str | None = None) -> nn.Module:
    """Train only the head (linear probing); all else is frozen and in evaluation mode.

    Args:
        model: the network.
        cache: whether the callback `CachedFeatures`, which every `attnkit.lightning.TaskModule`
            then adds, computes the features of each sample only once.
        head: as in `full`.

    Raises:
        ValueError: the model is fine-tuned already, or no head is found.
    """
    check_new(model)
    found = head_of(model, head)
    if not found:
        raise ValueError(
            f"head: {type(model).__name__} has no head that can be found by its name; give head=…"
        )
    train_only(model, lambda name: is_below(name, found))
    keep_frozen_in_evaluation(model)
    note(model, FineTuned("head", found, {"cache": cache, "head": head}))
    return model


def last_blocks(
    model: nn.Module,
    num_blocks: int = 2,
    *,
    layer_decay: float | None = None,
    head_lr: float | None = None,
    head: str | None = None,
) -> nn.Module:
    """Train the last blocks, everything after them, and the head.

    Everything before is frozen and in evaluation mode: no dropout, norms with their running
    statistics, and no gradients.

    Args:
        model: a network with blocks, known by timm's `group_matcher`, else by the lists in it.
        num_blocks: number of trained blocks.
        layer_decay, head_lr, head: as in `full`.

    Raises:
        ValueError: the model is fine-tuned already, has fewer blocks, or no blocks.
    """
    check_new(model)
    whole_number(num_blocks=num_blocks)
    check_rates(layer_decay, head_lr)
    found = head_of(model, head)
    numbers = layer_numbers(model, found)
    total = max((n for name, n in numbers.items() if not is_below(name, found)), default=0)
    if not total:
        raise ValueError(
            f"num_blocks: {type(model).__name__} has no blocks that attnkit recognizes"
        )
    if num_blocks > total:
        raise ValueError(f"num_blocks: expected at most {total}, its blocks, got {num_blocks}")
    train_only(model, lambda name: numbers.get(name, 0) > total - num_blocks)
    keep_frozen_in_evaluation(model)
    options = {"num_blocks": num_blocks, "head": head}
    note(model, FineTuned("last_blocks", found, options, layer_decay, head_lr))
    return model


def bitfit(
    model: nn.Module,
    *,
    layer_decay: float | None = None,
    head_lr: float | None = None,
    head: str | None = None,
) -> nn.Module:
    """Train the biases and the head (Ben Zaken et al., BitFit, 2022).

    The biases of norms are trained, too. Dropout stays as in full training; batch norms keep their
    running statistics.

    Args:
        model: the network.
        layer_decay, head_lr, head: as in `full`.

    Raises:
        ValueError: the model is fine-tuned already, or has no bias.
    """
    check_new(model)
    check_rates(layer_decay, head_lr)
    found = head_of(model, head)
    train_only(model, lambda name: name.endswith("bias") or is_below(name, found))
    outside = (n for n, p in model.named_parameters() if p.requires_grad and not is_below(n, found))
    if next(outside, None) is None:
        raise ValueError(f"bitfit: {type(model).__name__} has no bias outside of its head")
    keep_batch_norms_in_evaluation(model)
    note(model, FineTuned("bitfit", found, {"head": head}, layer_decay, head_lr))
    return model


def check_rates(layer_decay: float | None, head_lr: float | None) -> None:
    """Raise ValueError if a decay or learning rate is out of range."""
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay: expected above 0 and at most 1, got {layer_decay!r}")
    if head_lr is not None:
        positive(head_lr=head_lr)


def whole_number(**arguments: object) -> None:
    """Raise ValueError unless each argument is an integer above 0."""
    for name, value in arguments.items():
        if type(value) is not int:
            raise ValueError(f"{name}: expected an integer, got {value!r}")
        at_least(1, **{name: value})
