"""The layers of a network that fine-tuning names: head, blocks, the depth of each parameter, and
linear layers that LoRA adapts."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

HEADS = ("head", "heads", "fc", "classifier", "lm_head")
_LISTS = re.compile(r"blocks|layers?|stages|features|encoder|(layer|stage)_?\d+")


def is_below(name: str, modules: Iterable[str]) -> bool:
    """Whether a parameter or module is one of these modules, or in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


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


PRESETS = ("attention", "mlp", "all")
_FUSED = ("in_proj", "qkv", "qkv_proj", "to_qkv", "c_attn", "Wqkv")
_SEPARATE = {
    "q": ("query_proj", "q_proj", "query", "to_q", "q"),
    "k": ("key_proj", "k_proj", "key", "to_k", "k"),
    "v": ("value_proj", "v_proj", "value", "to_v", "v"),
}
Rows = list[tuple[int, int]]


def find_targets(
    network: nn.Module, targets: str | Sequence[str], head: Sequence[str], qkv: str
) -> dict[str, tuple[nn.Linear, Rows | None]]:
    """Return linear layers by name, with the rows of each that are adapted (None: all).

    Args:
        targets: "attention", "mlp", "all", or globs of module names.
        head: modules that are left out.
        qkv: which of queries, keys and values are adapted.

    Raises:
        ValueError: no linear layer is left, or a glob matches none.
    """
    if not qkv or set(qkv) - set("qkv") or len(set(qkv)) < len(qkv):
        raise ValueError(f"qkv: expected some of the letters q, k and v, got {qkv!r}")
    layers = _linears(network, head)
    if not layers:
        raise ValueError(
            f"targets: {type(network).__name__} has no linear layer that LoRA can adapt, but "
            "those in its head"
        )
    patterns = [targets] if isinstance(targets, str) else list(targets)
    if not patterns:
        raise ValueError("targets: expected a name or glob, got none")
    chosen: dict[str, nn.Linear] = {}
    for pattern in patterns:
        found = {name: layer for name, layer in layers.items() if _is_meant(network, name, pattern)}
        if not found:
            few = [*layers][:3]
            more = ", …" if len(layers) > 3 else ""
            raise ValueError(
                f"targets: {pattern!r} matches no linear layer of {type(network).__name__}; it has "
                f"{', '.join(few)}{more}"
            )
        chosen |= found
    rows = {name: _rows(network, name, layer, qkv) for name, layer in chosen.items()}
    return {name: (layer, rows[name]) for name, layer in chosen.items() if rows[name] != []}


def _linears(network: nn.Module, head: Sequence[str]) -> dict[str, nn.Linear]:
    """Return linear layers outside of the head whose weight no other layer uses."""
    from attnkit.layers.graph.blocks import SparseLinear  # no part of a plain job

    uses = Counter(id(p) for _, p in network.named_parameters(remove_duplicate=False))
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear)
        and (type(module).forward is nn.Linear.forward or isinstance(module, SparseLinear))
        and not is_below(name, head)
        and uses[id(module.weight)] == 1
    }


def _is_meant(network: nn.Module, name: str, pattern: str) -> bool:
    if pattern not in PRESETS:
        return fnmatchcase(name, pattern)
    parts = name.split(".")
    in_mlp = any("mlp" in part.lower() or "ffn" in part.lower() for part in parts)
    # older models of transformers have layer.intermediate.dense and layer.output.dense
    in_mlp |= parts[-2:-1] == ["intermediate"] or (
        parts[-2:-1] == ["output"]
        and hasattr(network.get_submodule(".".join(parts[:-2])), "intermediate")
    )
    if pattern == "attention":
        return not in_mlp and any(map(_is_attention, _around(network, parts)))
    return pattern == "all" or in_mlp


def _around(network: nn.Module, parts: list[str]) -> list[tuple[str, nn.Module]]:
    """Return the modules around a layer, from the outermost, without the layer itself."""
    paths = [".".join(parts[:end]) for end in range(1, len(parts))]
    return [(path.rpartition(".")[2], network.get_submodule(path)) for path in paths]


def _is_attention(named: tuple[str, nn.Module]) -> bool:
    texts = [text.lower() for text in (named[0], type(named[1]).__name__)]
    return any("attn" in text or "attention" in text for text in texts)


def _rows(network: nn.Module, name: str, layer: nn.Linear, qkv: str) -> Rows | None:
    """Return the rows that are adapted: all (None), those of some thirds, or none ([])."""
    if set(qkv) == set("qkv"):
        return None
    parent, _, last = name.rpartition(".")
    for letter, names in _SEPARATE.items():
        if last in names and letter not in qkv:
            return []
    if last not in _FUSED:
        return None
    sizes = getattr(network.get_submodule(parent), "sizes", None)  # attnkit's: k and v may differ
    sizes = sizes or [layer.out_features // 3] * 3
    if sum(sizes) != layer.out_features:
        raise ValueError(f"qkv: {name} has {layer.out_features} rows, which is not a multiple of 3")
    ends = [sum(sizes[: i + 1]) for i in range(3)]
    return [(ends[i] - sizes[i], ends[i]) for i, letter in enumerate("qkv") if letter in qkv]
