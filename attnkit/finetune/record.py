"""The record of how a network is fine-tuned, which is stored on the network."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


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


def is_below(name: str, modules: Iterable[str]) -> bool:
    """Whether a parameter or module is one of these modules, or in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


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
