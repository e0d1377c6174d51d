"""The stages of a network, found in a dry run: the last block of each height × width."""

from __future__ import annotations

import re
from itertools import groupby

from torch import nn

from attnkit.surgery.dry_run import DryRun
from attnkit.surgery.paths import Node, Paths

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
