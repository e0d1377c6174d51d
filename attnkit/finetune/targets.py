"""The choice of a network's linear layers that are adapted."""

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from attnkit.finetune.record import is_below
from attnkit.layers.graph.blocks import SparseLinear

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
