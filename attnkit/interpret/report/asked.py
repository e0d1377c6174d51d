"""What is asked of a model, once it is known what there is to explain."""

from collections.abc import Callable
from dataclasses import dataclass

Step = Callable[[str], None]
"""Told what is done next."""


@dataclass(frozen=True)
class Asked:
    """methods: of `attnkit.explain`. target: the number of a class. trust: "fast", "full" or
    "none". nodes: of a graph. seed, batch_size: as of `attnkit.trust`."""

    methods: tuple[str, ...]
    target: int | None = None
    trust: str = "fast"
    nodes: tuple[int, ...] = ()
    batch_size: int = 64
    seed: int = 0

    @property
    def is_full(self) -> bool:
        """Whether what takes long is wanted too."""
        return self.trust == "full"
