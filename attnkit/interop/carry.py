"""What every conversion does: look at the class, refuse what is unknown, rename, load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from attnkit.models.loading import load_matching

__all__ = ["State", "check_class", "has_hooks", "loaded", "refuse", "renamed", "unknown_parts"]

State = dict[str, Tensor]


def check_class(module: object, *expected: type) -> None:
    """Subclasses may compute anything, so only the class itself will do, or one of several."""
    if type(module) not in expected:
        names = ", ".join(f"{known.__module__}.{known.__name__}" for known in expected)
        given = type(module)
        raise TypeError(f"expected {names} itself, got {given.__module__}.{given.__name__}")


def refuse(module: nn.Module, reasons: Mapping[str, bool]) -> None:
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(f"{type(module).__name__} cannot be carried over: {'; '.join(found)}")


def unknown_parts(model: nn.Module, known: set[Any]) -> dict[str, bool]:
    """The modules of no known type or with hooks, whose computation is therefore unknown."""
    places: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if type(module) not in known:
            places.setdefault(type(module).__name__, []).append(name)
        elif has_hooks(module):
            places.setdefault("hooks", []).append(name or "the model itself")
    return {f"{what} at {_shortened(names)}": True for what, names in places.items()}


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def has_hooks(module: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def renamed(state: Mapping[str, Tensor], names: Mapping[str, str]) -> State:
    """With parts of names replaced in turn; a name without such a part stays and is refused."""
    renamed = {}
    for name, tensor in state.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    return renamed


def loaded(ours: Any, state: State, theirs: nn.Module) -> Any:
    """Our module with the state, in the mode, dtype and place of the original."""
    ours = ours.to(next(theirs.parameters()))  # first, lest float64 passes through float32
    load_matching(ours, state, type(theirs).__name__)
    return ours.train(theirs.training)
