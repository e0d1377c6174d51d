"""Hooks that call inserted attention, which they find through the module that owns it.

They are plain objects with references to modules and no closures, so that copies and pickles of a
network have hooks on their own modules, and a module that replaces the attention is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class AttendOutput:
    """A forward hook: the module's output goes through `owner.<name>`.

    channels_last: whether the output is [batch, height, width, channels].
    """

    channels_last = False  # default for networks pickled before this option

    def __init__(self, owner: nn.Module, name: str, *, channels_last: bool = False) -> None:
        self.owner = owner
        self.name = name
        self.channels_last = channels_last

    def __call__(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return self.attend(output)

    def attend(self, maps: Tensor) -> Tensor:
        attention = getattr(self.owner, self.name)
        if not self.channels_last:
            return attention(maps)
        output = attention(maps.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        # the network may take a view of the output
        return output.contiguous() if maps.is_contiguous() else output


class AttendInput(AttendOutput):
    """A forward pre-hook: the module's input goes through `owner.<name>`."""

    def __call__(self, module: nn.Module, args: tuple, output: Any = None) -> Any:
        return self.attend(args[0]), *args[1:]


class Guard:
    """A forward pre-hook of a block that raises if a hooked child was replaced.

    `SyncBatchNorm.convert_sync_batchnorm` and fusions replace modules and leave their hooks behind,
    so that the attention would silently never be called.
    """

    def __init__(self, child: str, name: str) -> None:
        self.child = child
        self.name = name

    def __call__(self, block: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling():
            return
        # a wrapper, such as FSDP's, holds the hooked module deeper down
        for module in getattr(block, self.child).modules():
            for hook in hooks_of(module):
                if hook.owner is block and hook.name == self.name:
                    return
        raise RuntimeError(
            f"{type(block).__name__}.{self.child} was replaced by another module after attention "
            f"was inserted, so {self.name!r} would not be called; insert attention after such "
            "changes (for SyncBatchNorm: after convert_sync_batchnorm)"
        )


class Unmergeable:
    """Replaces a module's method that would merge the module and its attention into one layer.

    timm's `reparameterize_model` calls `fuse`, `reparameterize` or `switch_to_deploy` if a module
    has them, and the children and hooks of the module are then lost.
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self) -> None:
        raise RuntimeError(
            f"{self.what} holds inserted attention, which merging its layers would drop; call "
            "reparameterize_model first and insert_attention then, or remove_attention before"
        )


def merging_methods(module: nn.Module) -> list[str]:
    """Return the methods by which timm's `reparameterize_model` makes one layer of a module."""
    names = ("fuse", "reparameterize", "switch_to_deploy")
    return [name for name in names if hasattr(module, name)]


def keep_apart(model: nn.Module, place: str) -> None:
    """Refuse to merge the layers around attention at `place`, the name of a hooked module.

    The module itself may be merged in place: its hooks and its child remain.
    """
    parts = place.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        module = model.get_submodule(name)
        for method in merging_methods(module):
            if name != place or method == "fuse":
                setattr(module, method, Unmergeable(f"{name} ({type(module).__name__})"))


def attach(place: nn.Module, hook: AttendOutput) -> None:
    if isinstance(hook, AttendInput):
        place.register_forward_pre_hook(hook)
    else:
        place.register_forward_hook(hook)


def hooks_of(module: nn.Module) -> Iterator[AttendOutput]:
    """Yield attnkit's hooks on a module."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if isinstance(hook, AttendOutput):
            yield hook


def detach_all(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Remove attnkit's hooks from all modules; return the owners and names that they called."""
    found: dict[tuple[nn.Module, str], None] = {}
    for module in model.modules():
        for method in merging_methods(module):
            if isinstance(vars(module).get(method), Unmergeable):
                delattr(module, method)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, AttendOutput | Guard):
                    del hooks[key]
                    owner = hook.owner if isinstance(hook, AttendOutput) else module
                    found[owner, hook.name] = None
    return list(found)
