"""Names of tensors in state dicts of before version 0.2, so that old checkpoints still load."""

from collections.abc import Sequence
from typing import Any


def rename(state: dict[str, Any], former: str, current: str) -> None:
    """Rename tensors of a state dict from the prefix `former` to the prefix `current`.

    For `_load_from_state_dict`, which every way of loading goes through, before that of torch.
    """
    for name in [name for name in state if name.startswith(former)]:
        state[current + name.removeprefix(former)] = state.pop(name)


def split(state: dict[str, Any], former: str, current: Sequence[str], sizes: Sequence[int]) -> None:
    """Tensors of a state dict under the prefix `former` as several, of so many rows, under the
    prefixes `current`."""
    for name in [name for name in state if name.startswith(former)]:
        if len(state[name]) == sum(sizes):
            names = [prefix + name.removeprefix(former) for prefix in current]
            state.update(zip(names, state.pop(name).split(sizes), strict=True))
