"""Residual branches, found in a dry run: a path that leaves another and is added to it again."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from attnkit.surgery.dry_run import DryRun
from attnkit.surgery.paths import Node, Paths


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
