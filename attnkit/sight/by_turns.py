"""Which of many images are shown."""

from collections.abc import Sequence


def by_turns(labels: Sequence[int], count: int) -> list[int]:
    """Their places: the first of each class, then the second of each, and so on."""
    seen: dict[int, int] = {}
    turns = []
    for row, label in enumerate(labels):
        seen[label] = seen.get(label, -1) + 1
        turns.append((seen[label], label, row))
    return [row for _, _, row in sorted(turns)[:count]]
