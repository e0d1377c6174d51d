"""The places in a network that a word or a glob selects for attention, and their maps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from attnkit.surgery.blocks import Branch, branches
from attnkit.surgery.dry_run import DryRun, Map
from attnkit.surgery.hooks import merging_methods
from attnkit.surgery.stages import stages

_CONTAINERS = nn.Sequential | nn.ModuleList | nn.ModuleDict


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
    """Return the places in the order in which the network runs them, with an example's maps.

    Raises:
        ValueError: there are none, or attention there would run several times.
    """
    run = DryRun(model, example, traced=where in ("blocks", "stages"))
    if where == "blocks" and (found := branches(run)):
        by_name: dict[tuple[str, bool], Place] = {}
        for branch in found:
            around = _merged_around(branch.module, run)
            place = _after(around, run) if around else _in_block(branch, run)
            by_name.setdefault((place.name, place.is_input), place)
        places = list(by_name.values())
    elif where == "blocks" and isinstance(model, nn.Sequential):
        places = [_after(name, run) for name in _plain_blocks(model, run)]
    elif where == "blocks":
        raise ValueError(
            f"model: no block of {type(model).__name__} adds a map to its input; where='stages' or "
            "a glob over module names, such as where='features.*', names other places"
        )
    elif where == "stages":
        places = [_after(name, run) for name in stages(run)]
        if not places:
            raise ValueError(
                f"model: {type(model).__name__} has no stage: none of its blocks gives a map "
                "[batch, channels, height, width] that all later maps depend on; name places by a "
                "glob, such as where='features.*'"
            )
    else:
        places = [_after(name, run) for name in _matches(where, run)]
    return _owned(places, run)


def _merged_around(branch: str, run: DryRun) -> str | None:
    """Return the outermost module around a branch that timm's `reparameterize_model` would merge.

    Attention on the branch would be lost with it, so it goes after that module.
    """
    parts = branch.split(".")
    for depth in range(1, len(parts)):
        name = ".".join(parts[:depth])
        if merging_methods(run.named[name]) and run.map_of(name) is not None:
            return name
    return None


def _in_block(branch: Branch, run: DryRun) -> Place:
    """Return the place at the end of a branch; the block owns the attention."""
    block, module = run.named[branch.block], run.named[branch.module]
    return Place(
        branch.module, module, branch.block, block, run.one_map(branch.module), branch.is_input
    )


def _after(name: str, run: DryRun) -> Place:
    """Return the place at the output of a module, which owns the attention."""
    module = run.named[name]
    return Place(name, module, name, module, run.one_map(name))


def _owned(places: list[Place], run: DryRun) -> list[Place]:
    """Make the last child the owner where a module calls all its children in turn, since it would
    call the attention too."""
    while True:
        owners = {place.owner for place in places}
        containers = [owner for owner in owners if isinstance(owner, _CONTAINERS)]
        calling: list[nn.Module] = [*containers] or run.calling_all_children(owners)
        if not calling:
            return places
        places = [_lowered(place) if place.owner in calling else place for place in places]


def _lowered(place: Place) -> Place:
    children = list(place.owner.named_children())
    if not children:
        raise ValueError(
            f"model: {place.owner_name} would call attention as a child, and has no child that "
            "could own it; choose another place"
        )
    name, owner = children[-1]
    owner_name = f"{place.owner_name}.{name}" if place.owner_name else name
    return replace(place, owner_name=owner_name, owner=owner)


def _matches(glob: str, run: DryRun) -> list[str]:
    """Return the modules with a matching name that return maps, in the order of finishing."""
    names = [name for name in run.named if name and fnmatchcase(name, glob)]
    if not names:
        gave = [name for name in run.calls if name and len(run.shape_of(name) or ()) == 4]
        near = get_close_matches(glob, gave, n=3)
        raise ValueError(
            f"where: expected 'blocks', 'stages' or a glob over module names, and {glob!r} matches "
            f"none; near it: {', '.join(near) or 'nothing'}"
        )
    maps = [name for name in run.calls if name in names and run.map_of(name) is not None]
    if not maps:
        raise ValueError(
            f"where: none of the {len(names)} modules that {glob!r} matches, such as {names[0]}, "
            "gives a map [batch, channels, height, width]"
        )
    return maps


def _plain_blocks(model: nn.Sequential, run: DryRun) -> list[str]:
    """Return the last module of each plain block: a child with a convolution inside, and those that
    follow it and keep the map's shape, such as a norm and an activation."""
    children = list(model.named_children())
    starts = [
        index
        for index, (_, child) in enumerate(children)
        if any(isinstance(module, _ConvNd) for module in child.modules())
    ]
    found = []
    for start, stop in pairwise([*starts, len(children)]):
        shape = run.shape_of(children[start][0])
        if shape is None:
            continue
        last = start
        while last + 1 < stop and run.shape_of(children[last + 1][0]) == shape:
            last += 1
        found.append(children[last][0])
    if not found:
        raise ValueError("model: no child of this nn.Sequential has a convolution and gives a map")
    return found
