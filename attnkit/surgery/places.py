"""The places in a network where attention may be inserted, and their maps: the ends of its stages
and residual blocks, which a dry run finds, or modules by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import groupby, pairwise

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from attnkit.surgery.dry_run import DryRun, Map, Node, Paths
from attnkit.surgery.hooks import merging_methods


@dataclass(frozen=True)
class Branch:
    """The end of a residual branch.

    block: the name of the innermost module around the branch and its addition.
    module: the name of the module that returns the branch's last map.
    is_input: whether that map is the module's input and not its output, for stochastic depth and
        other modules that return their input in evaluation. Attention belongs to what is dropped.
    """

    block: str
    module: str
    is_input: bool


def branches(run: DryRun) -> list[Branch]:
    """Return the branches that end in maps, in the order in which they end.

    A branch ends where it is added to its shortcut. The shortcut is the tensor from which both were
    computed, or a projection of it: a chain with a module in it, shorter than the branch. The
    branch ends at its last module; what no module computes, such as the product with a layer scale,
    comes after the attention.
    """
    paths = run.paths
    if paths is None:
        return []
    found: dict[Branch, None] = {}
    for total, summands in paths.before.items():
        if total[0].name() == "AddBackward0" and len(summands) == 2:
            start = paths.dominator[total]
            node = _branch(run, paths, start, summands)
            module, node = _last_module(run, paths, node, start)
            if module and run.map_of(module) is not None:
                branch = _ending(run, paths, module, node, total)
                if not _is_broadcast(run, branch):
                    found[branch] = None
    order = {name: index for index, name in enumerate(run.calls)}
    return sorted(found, key=lambda branch: order[branch.module])


def _branch(run: DryRun, paths: Paths, start: Node, summands: list[Node]) -> Node:
    """Return the summand that is the branch; the start if neither is a shortcut."""
    for shortcut, branch in (summands, summands[::-1]):
        if shortcut == start:
            return branch
        node, length, is_projection = shortcut, 0, False
        while node != start and len(before := paths.before[node]) == 1:
            length, is_projection = length + 1, is_projection or node in run.givers
            (node,) = before
        if node == start and is_projection and length < paths.depth[branch] - paths.depth[start]:
            return branch
    return start


def _last_module(run: DryRun, paths: Paths, node: Node, start: Node) -> tuple[str, Node]:
    """Return the first module that gave the node, or the last node before it that a module gave. A
    module that runs several times or does nothing is taken only if there is no other."""
    last = "", node
    while node != start:
        names = run.givers.get(node, [])
        once = [name for name in names if run.calls[name] == 1]
        acting = [name for name in once if not isinstance(run.named[name], nn.Identity)]
        if acting or once:
            return (acting or once)[0], node
        if names and not last[0]:
            last = names[0], node
        if len(before := paths.before[node]) != 1:
            break
        (node,) = before
    return last


def _ending(run: DryRun, paths: Paths, module: str, node: Node, total: Node) -> Branch:
    """Return the branch with the outermost module that gave the node before another passed it on,
    and the innermost that gave the sum, or what was computed from it."""
    is_input = run.starts.get(module) == node
    givers = run.givers[node]
    for name in givers[givers.index(module) + 1 :] if not is_input else ():
        if module.startswith(f"{name}.") and run.calls[name] == 1:
            module = name
        elif not isinstance(run.named[name], nn.Identity):
            break
    block = module
    while block:
        block = block.rpartition(".")[0]
        end = run.ends.get(block)
        if end in paths.depth and paths.dominates(total, end):
            break
    return Branch(block, module, is_input)


def _is_broadcast(run: DryRun, branch: Branch) -> bool:
    """Whether the added map is one pixel for all, such as a global context."""
    added, block = run.map_of(branch.module), run.map_of(branch.block)
    return added is not None and block is not None and added.shape[2:] == (1, 1) != block.shape[2:]


Size = tuple[int, int]


def stages(run: DryRun) -> list[str]:
    """Return the names of the modules that end the stages, in order.

    Each returns a map of the network's main path, so that what follows depends on earlier maps only
    through this one. A block is a module in which the main path divides and joins again, with
    weights in between (residual, inception, dense), or one of its class, or of its name except for
    numbers; in a network whose path never divides, a module that holds several with weights. If a
    divided part of the path is not a module of its own, the stage ends with the first module after
    it; if there are weights and no block in a path that never divides, with the last module of the
    size.
    """
    paths = run.paths
    if paths is None:
        return []
    index = {node: number for number, node in enumerate(paths.main)}
    place = {name: index[node] for name, node in run.ends.items() if node in index}
    sizes = _sizes(run, place)
    joins = _joins(run, paths, index)
    blocks = _blocks(run, sizes, place, index, joins)
    in_order = sorted(sizes, key=lambda name: (place[name], -name.count(".")))
    found, reached = [], 0
    for size, group in groupby(in_order, key=sizes.__getitem__):
        names = list(group)
        joined = [j for j in joins if reached < j <= place[names[-1]] and size in joins[j]]
        reached = place[names[-1]]
        if not joins and size == (1, 1):  # what follows the pooling
            continue
        if inside := [name for name in names if name in blocks]:
            found.append(inside[-1])
        elif joined:
            found.append(_first_from(max(joined), names, place))
        elif not joins and any(_has_weights(run, name) for name in names):
            found.append(names[-1])
    return found


def _sizes(run: DryRun, place: dict[str, int]) -> dict[str, Size]:
    """Return height and width of the main path's maps, by the module that gives it, run once."""
    maps = {name: run.map_of(name) for name in place if name and run.calls[name] == 1}
    return {name: (m.shape[2], m.shape[3]) for name, m in maps.items() if m is not None}


def _joins(run: DryRun, paths: Paths, index: dict[Node, int]) -> dict[int, set[Size]]:
    """Return where the main path joins again after it divided, by index, and the sizes of the
    joined maps. A gate, which goes from one mean to one factor a channel, does not divide it."""
    joins: dict[int, set[Size]] = {}
    for name, node in run.ends.items():
        shape = run.shape_of(name)
        if node not in paths.depth or node in index or shape is None:
            continue
        if _has_weights(run, name) and shape[1:].numel() > max(shape[1:], default=1):
            nearest = next(index[found] for found in paths.dominators(node) if found in index)
            joins[nearest + 1] = set()
    for join, sizes in joins.items():
        nodes = list(paths.before[paths.main[join]])
        for node in nodes:  # grows: a node of no module has the size of those before it
            if node not in run.givers:
                nodes += [n for n in paths.before.get(node, ()) if n not in {*nodes, *index}]
            shapes = [run.shape_of(name) for name in run.givers.get(node, ())]
            sizes |= {(s[2], s[3]) for s in shapes if s is not None and len(s) == 4}
    return joins


def _blocks(
    run: DryRun,
    sizes: dict[str, Size],
    place: dict[str, int],
    index: dict[Node, int],
    joins: dict[int, set[Size]],
) -> set[str]:
    """Return around each join the module with the shortest way through it, and modules of its class
    or of its name except for numbers; any module if nothing joins. None is inside another."""
    start = {name: index.get(run.starts.get(name), len(index)) for name in sizes}  # type: ignore[arg-type]
    blocks = set()
    for join in joins:
        around = [name for name in sizes if start[name] < join <= place[name]]
        if around:
            shortest = min(around, key=lambda n: (place[n] - start[n], -n.count(".")))
            blocks.add(shortest)
    alike = {
        key
        for name in blocks
        if not _is_container(run.named[name])
        for key in (type(run.named[name]), _numbered(name))
    }
    for name in sizes:
        module = run.named[name]
        has_inside = any(p.ndim > 1 for p in module.parameters()) and any(module.children())
        is_alike = alike & {type(module), _numbered(name)} or not joins
        if has_inside and is_alike and not _is_container(module):
            blocks.add(name)
    return {name for name in blocks if not any(name.startswith(f"{b}.") for b in blocks)}


def _first_from(join: int, names: list[str], place: dict[str, int]) -> str:
    """Return the first module at the join or after it, or one around it that gives a map too."""
    first = next(name for name in names if place[name] >= join)
    around = [name for name in names if f"{first}.".startswith(f"{name}.")]
    return min(around, key=len)


def _has_weights(run: DryRun, name: str) -> bool:
    return any(p.ndim > 1 for p in run.named[name].parameters(recurse=False))


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def _numbered(name: str) -> str:
    return re.sub(r"\d+", "#", name)


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
