"""Which of many images are shown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor


def by_turns(labels: Sequence[int], count: int) -> list[int]:
    """Their places: the first of each class, then the second of each, and so on."""
    seen: dict[int, int] = {}
    turns = []
    for row, label in enumerate(labels):
        seen[label] = seen.get(label, -1) + 1
        turns.append((seen[label], label, row))
    return [row for _, _, row in sorted(turns)[:count]]


def num_rows(batch: Any) -> int:
    """How many a batch has, by its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch)
    values = batch.values() if isinstance(batch, Mapping) else batch
    some = values if isinstance(values, Iterable) else ()
    return next((len(value) for value in some if isinstance(value, Tensor) and value.ndim), 0)
