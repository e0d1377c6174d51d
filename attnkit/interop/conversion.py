"""The steps of every conversion: check the class, refuse what is unknown, rename, load."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Tensor]


def check_class(module: object, *expected: type) -> None:
    """Raise TypeError unless the class is one of these: subclasses may compute anything."""
    if type(module) not in expected:
        names = ", ".join(f"{known.__module__}.{known.__name__}" for known in expected)
        given = type(module)
        raise TypeError(f"expected {names} itself, got {given.__module__}.{given.__name__}")


def refuse(module: nn.Module, reasons: Mapping[str, bool]) -> None:
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(f"{type(module).__name__} cannot be converted: {'; '.join(found)}")


def unknown_parts(model: nn.Module, known: set[Any]) -> dict[str, bool]:
    """Return modules of unknown types or with hooks, whose computation is therefore unknown."""
    places: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if type(module) not in known:
            places.setdefault(type(module).__name__, []).append(name)
        elif has_hooks(module):
            places.setdefault("hooks", []).append(name or "the model itself")
    return {f"{what} at {shortened(names)}": True for what, names in places.items()}


def shortened(names: Collection[str]) -> str:
    """Return a text with the first two of many names."""
    first, rest = list(names)[:2], len(names) - 2
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")


def has_hooks(module: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def renamed(state: Mapping[str, Tensor], names: Mapping[str, str]) -> State:
    """Return the state with parts of names replaced in turn; other names are refused later."""
    renamed = {}
    for name, tensor in state.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    return renamed


def state_of(module: nn.Module, prefix: str = "") -> State:
    """Return a state dict of the parameters themselves, which know whether they are frozen; layers
    of PyG detach them even with `keep_vars=True`."""
    state = module.state_dict(prefix=prefix)
    named = module.named_parameters(prefix.removesuffix("."), remove_duplicate=False)
    return state | {name: parameter for name, parameter in named if name in state}


def joined(*parts: Tensor) -> Tensor:
    """Concatenate parameters of the original that are one parameter here.

    Raises:
        ValueError: some of them are frozen and others are not.
    """
    if len({part.requires_grad for part in parts}) > 1:
        raise ValueError(
            f"requires_grad: {len(parts)} parameters are one here, and some of them are frozen; "
            "freeze all of them or none"
        )
    return torch.cat(parts)


def loaded(ours: Any, state: State, theirs: nn.Module) -> Any:
    """Return our module with the state, in the mode of the original. Dtype and device of each
    parameter, and whether it is frozen, are those in the state, which is made of `state_of` with
    gradients enabled.

    Raises:
        ValueError: names or shapes are not exactly the module's; nothing is loaded.
    """
    source = type(theirs).__name__
    here = {name: tuple(tensor.shape) for name, tensor in ours.state_dict().items()}
    there = {name: tuple(tensor.shape) for name, tensor in state.items()}
    differ = [
        f"{name} is {there.get(name, 'missing')} in {source} and {here.get(name, 'missing')} here"
        for name in dict.fromkeys([*there, *here])
        if here.get(name) != there.get(name)
    ]
    if differ:
        raise ValueError(f"{source} does not fit {type(ours).__name__}: {shortened(differ)}")
    ours = ours.to(next(theirs.parameters()))  # for buffers that are in no state
    ours.load_state_dict(
        {name: tensor.detach().clone() for name, tensor in state.items()}, assign=True
    )
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(state[name].requires_grad)
    return ours.train(theirs.training)
