"""The order of a network's layers: its head, its blocks, and the depth of each parameter."""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

HEADS = ("head", "heads", "fc", "classifier", "lm_head")
_LISTS = re.compile(r"blocks|layers?|stages|features|encoder|(layer|stage)_?\d+")


def head_of(network: nn.Module, head: str | None = None) -> tuple[str, ...]:
    """Return the names of the modules that compute the outputs of a task from the features.

    They are the modules that a glob of names matches; without one, timm's classifier, else the
    modules nearest to the top that are called head, fc or classifier, else the last block.

    Raises:
        ValueError: a glob that matches no module with parameters.
    """
    names = [name for name, child in network.named_modules() if name and _has_parameters(child)]
    if head is not None:
        found = [name for name in names if fnmatchcase(name, head)]
        if not found:
            known = ", ".join(names[-4:])
            raise ValueError(f"head: {head!r} matches no module with parameters; its last: {known}")
        return tuple(name for name in found if not _inside(name, found))
    classifier = (getattr(network, "pretrained_cfg", None) or {}).get("classifier") or ()
    classifier = (classifier,) if isinstance(classifier, str) else classifier
    if found := [name for name in classifier if name in names]:
        return tuple(found)
    found = [name for name in names if name.rpartition(".")[2] in HEADS]
    if found:
        depth = min(name.count(".") for name in found)
        return tuple(name for name in found if name.count(".") == depth)
    return tuple(blocks_of(network)[-1:])


def blocks_of(network: nn.Module) -> list[str]:
    """Return the names of the blocks that a network applies one after the other, in order."""
    return list(_blocks(network, ""))


def layer_numbers(network: nn.Module, head: Sequence[str]) -> dict[str, int]:
    """Return the depth of each parameter: 0 before the blocks, one for each block, then the head.

    timm's `group_matcher` decides if the network has one. A norm after the last block belongs to
    that block.
    """
    if hasattr(network, "group_matcher"):
        from timm.models import group_parameters

        matcher = network.group_matcher(coarse=False)  # type: ignore[operator]
        numbers: dict[str, int] = group_parameters(network, matcher, reverse=True)
    else:
        blocks = blocks_of(network)
        numbers, last = {}, 0
        for name, _ in network.named_parameters(remove_duplicate=False):
            at = next((i for i, block in enumerate(blocks) if _inside(name, [block])), None)
            last = last if at is None else at + 1
            numbers[name] = last
    deepest = max((n for name, n in numbers.items() if not _inside(name, head)), default=-1)
    return {name: deepest + 1 if _inside(name, head) else n for name, n in numbers.items()}


def _blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        is_list = isinstance(child, nn.ModuleList)
        if not is_list and not (isinstance(child, nn.Sequential) and _LISTS.fullmatch(name)):
            yield from _blocks(child, f"{full}.")
            continue
        for index, element in child.named_children():
            inner = list(_blocks(element, f"{full}.{index}."))
            if isinstance(element, nn.Sequential):
                inner = [f"{full}.{index}.{i}" for i, _ in element.named_children()]
            if len(inner) > 1:  # a stage
                yield from inner
            elif _has_parameters(element):
                yield f"{full}.{index}"


def _inside(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
