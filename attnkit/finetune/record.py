"""What was done to a network to fine-tune it: a record that stays on it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True)
class FineTuned:
    """How a network is fine-tuned; `network.finetuned`.

    method: the name of the function that did it.
    head: the names of the modules that count as its head.
    options: arguments of the method, as plain data.
    layer_decay, head_lr: of `attnkit.lightning.parameter_groups`.
    """

    method: str
    head: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    layer_decay: float | None = None
    head_lr: float | None = None


def note(network: nn.Module, record: FineTuned) -> None:
    """Leave the record on the network."""
    network.finetuned = record  # type: ignore[assignment]


def finetuned(module: nn.Module) -> tuple[str, nn.Module, FineTuned] | None:
    """Find the fine-tuned network in a module: its name there, the network, and its record."""
    for name, child in module.named_modules():
        record = child.__dict__.get("finetuned")
        if isinstance(record, FineTuned):
            return name, child, record
    return None


def check_new(network: nn.Module) -> None:
    """ValueError if it is being fine-tuned already, TypeError if it is not a network."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(network).__name__}")
    if (found := finetuned(network)) is not None:
        raise ValueError(f"model: it is already fine-tuned, by {found[2].method}")


def train_only(network: nn.Module, chosen: Callable[[str], bool]) -> None:
    """Freeze all parameters but those whose names are chosen."""
    network.requires_grad_(False)
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if chosen(name):
            parameter.requires_grad_(True)


def is_below(name: str, modules: Iterable[str]) -> bool:
    """Whether a parameter or module is in one of these modules or is one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


# --- evaluation mode of what is frozen ------------------------------------------------------------

_ALIKE = {nn.Linear, nn.LayerNorm, nn.Conv2d, nn.Embedding, nn.Identity}
"""Leaves that compute the same in training and evaluation."""


def keep_frozen_in_evaluation(network: nn.Module) -> None:
    """What comes before the first trained module, and later modules that are frozen as a whole,
    stay in evaluation mode: no dropout, no drop path, no running statistics."""
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
    """Running statistics are a part of the weights: those of frozen norms stay as they are."""
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
    if module.training:  # somebody has called train() of the whole
        module.eval()
