"""Where attention goes: the places of a network that a word or a glob means, and their maps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from attnkit.core.watch.undisturbed import undisturbed
from attnkit.surgery.blocks import adding_child, branch_of
from attnkit.surgery.hooks import hooks_of

__all__ = ["Map", "Place", "find_places"]


class Map(NamedTuple):
    """What is known of a map [batch, channels, height, width]."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        """One map of this kind."""
        return torch.zeros(1, *self.shape[1:], dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Place:
    """A module at whose output (or input) attention goes, and the module that will own it."""

    name: str
    module: nn.Module
    owner_name: str
    owner: nn.Module
    map: Map
    is_input: bool = False

    def __str__(self) -> str:
        return f"{'before' if self.is_input else 'after'} {self.name or 'the model'}"


def find_places(model: nn.Module, where: str, example: Tensor | None) -> list[Place]:
    """The places in the order in which the network runs through them, with an example's maps."""
    named = dict(model.named_modules())
    residual = {name: module for name, module in named.items() if branch_of(module) is not None}
    if where in ("blocks", "stages") and not residual and not isinstance(model, nn.Sequential):
        raise ValueError(
            f"model: no residual block of {type(model).__name__} is known; name the modules after "
            "which attention goes by a glob, such as where='features.*'"
        )
    ran = _dry_run(model, named, example)
    if where == "stages":
        blocks = residual or dict(_plain_blocks(model, ran))
        return [_after(name, named, ran) for name in _last_of_each_size(blocks, ran)]
    if where != "blocks":
        return [_after(name, named, ran) for name in _matches(where, named, ran)]
    if not residual:
        return [_after(name, named, ran) for name, _ in _plain_blocks(model, ran)]
    places = [_in_block(name, block, ran) for name, block in residual.items()]
    found = sorted((p for p in places if p is not None), key=lambda p: ran.order[p.name])
    if not found:
        raise ValueError(f"model: none of the {len(residual)} blocks adds a residual")
    return found


@dataclass(frozen=True)
class _Ran:
    """What a dry run saw: of each module how often it ran, in which order, and its map, None where
    something else came out."""

    calls: Counter[str]
    order: dict[str, int]
    maps: dict[str, Map | None]

    def see(self, name: str, output: object) -> None:
        self.calls[name] += 1
        self.order.setdefault(name, len(self.order))
        is_map = isinstance(output, Tensor) and output.ndim == 4 and output.is_floating_point()
        self.maps[name] = Map(output.shape, output.dtype, output.device) if is_map else None  # type: ignore[attr-defined]

    def one_map(self, name: str) -> Map:
        """The map of a module that runs once in a pass."""
        found = self.maps.get(name)
        if found is None:
            what = "gave no map" if name in self.maps else "did not run"
            raise ValueError(f"model: {name} {what} in the dry run")
        if self.calls[name] > 1:
            raise ValueError(
                f"model: {name} runs {self.calls[name]} times in one pass, and attention there "
                "would run each time; choose another place"
            )
        return found


def _dry_run(model: nn.Module, named: dict[str, nn.Module], example: Tensor | None) -> _Ran:
    ran = _Ran(Counter(), {}, {})
    if example is not None and not isinstance(example, Tensor):
        raise TypeError(f"example: expected a tensor or None, got {type(example).__name__}")
    given = _example_for(model) if example is None else example
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        for name, module in named.items():

            def hook(module, args, output, name=name):
                ran.see(name, output)

            stack.callback(module.register_forward_hook(hook).remove)
        try:
            model(given)
        except Exception as error:
            raise ValueError(
                f"example: the dry run with {'an' if example is None else 'the'} input of the "
                f"shape {list(given.shape)} failed with {type(error).__name__}: {error}; give "
                "example=, a batch that the model takes"
            ) from error
    return ran


def _example_for(model: nn.Module) -> Tensor:
    """Zeros of the size that timm noted, else 224 × 224, with the channels of the first
    convolution, where and what the parameters are."""
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    channels, height, width = dict(config).get("input_size") or (3, 224, 224)
    for module in model.modules():
        if isinstance(module, _ConvNd):
            channels = module.in_channels
            break
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    return torch.zeros(1, channels, height, width, device=like.device, dtype=like.dtype)


def _in_block(name: str, block: nn.Module, ran: _Ran) -> Place | None:
    branch = branch_of(block)
    assert branch is not None
    child = adding_child(block, branch)
    if child is None:
        return None
    inside = f"{name}.{child}" if name else child
    module = getattr(block, child)
    return Place(inside, module, name, block, ran.one_map(inside), branch.is_input)


def _after(name: str, named: dict[str, nn.Module], ran: _Ran) -> Place:
    """At the output of a module; owned by it, or by the last module inside a container, whose
    children are called in turn, so that it can own nothing beside them."""
    owner_name, owner = name, named[name]
    while isinstance(owner, nn.Sequential | nn.ModuleList | nn.ModuleDict) and len(owner):
        child, owner = list(owner.named_children())[-1]
        owner_name = f"{owner_name}.{child}" if owner_name else child
    return Place(name, named[name], owner_name, owner, ran.one_map(name))


def _inserted(named: dict[str, nn.Module]) -> tuple[str, ...]:
    """How the names of modules begin that are, or are in, attention inserted before."""
    owners = {id(module): name for name, module in named.items()}
    hooks = [hook for module in named.values() for hook in hooks_of(module)]
    return tuple(f"{owners[id(hook.owner)]}.{hook.name}".lstrip(".") for hook in hooks)


def _matches(glob: str, named: dict[str, nn.Module], ran: _Ran) -> list[str]:
    inserted = _inserted(named)
    names = [
        name for name in named if name and fnmatchcase(name, glob) and not name.startswith(inserted)
    ]
    if not names:
        near = get_close_matches(
            glob, [name for name in named if ran.maps.get(name) is not None], n=3
        )
        raise ValueError(
            f"where: expected 'blocks', 'stages' or a glob over module names, and {glob!r} matches "
            f"none; near it: {', '.join(near) or 'nothing'}"
        )
    maps = [name for name in names if ran.maps.get(name) is not None]
    if not maps:
        raise ValueError(
            f"where: none of the {len(names)} modules that {glob!r} matches, such as {names[0]}, "
            "gives a map [batch, channels, height, width]"
        )
    return sorted(maps, key=lambda name: ran.order[name])


def _plain_blocks(model: nn.Module, ran: _Ran) -> Iterable[tuple[str, nn.Module]]:
    """Of an `nn.Sequential`: each child with a convolution inside, through what follows it and
    leaves the map's shape, such as a norm and an activation; the last module of each."""
    children = list(model.named_children())
    starts = [
        index
        for index, (_, child) in enumerate(children)
        if any(isinstance(module, _ConvNd) for module in child.modules())
    ]
    found = []
    for start, stop in pairwise([*starts, len(children)]):
        first = ran.maps.get(children[start][0])
        if first is None:
            continue
        last = start
        while last + 1 < stop:
            following = ran.maps.get(children[last + 1][0])
            if following is None or following.shape != first.shape:
                break
            last += 1
        found.append(children[last])
    if not found:
        raise ValueError("model: no child of this nn.Sequential has a convolution and gives a map")
    return found


def _last_of_each_size(blocks: dict[str, nn.Module], ran: _Ran) -> list[str]:
    in_order = sorted(blocks, key=lambda name: ran.order.get(name, -1))
    runs = groupby(in_order, key=lambda name: ran.one_map(name).shape[2:])
    return [list(run)[-1] for _, run in runs]
