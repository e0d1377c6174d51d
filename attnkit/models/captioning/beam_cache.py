"""A cache of keys and values that all hypotheses of an item share."""

import torch
from torch import Tensor


class BeamCache:
    """The columns of a cache that the hypotheses of an item share, and the mask of their pasts.

    Each step every hypothesis writes one column behind those before. A hypothesis reads its own
    past only: a bias [batch, 1, num_beams, columns] is 0 there and −∞ elsewhere. When hypotheses
    survive, their rows of the bias are copied; keys and values stay where they are. Every step
    reads the columns of all hypotheses, dead ones included.

    Args:
        batch: number of items.
        max_words: number of steps.
        max_beams: largest number of hypotheses of an item.
    """

    def __init__(
        self,
        batch: int,
        max_words: int,
        max_beams: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.batch = batch
        self.max_columns = max_words * max_beams
        self.max_beams = max_beams
        self.num_beams = 1
        self.num_words = 0
        self.num_columns = 0
        self.places: list[int] = []  # the word position of each column
        self._dtype, self._device = dtype, device
        self._bias: Tensor | None = None
        self._own = torch.empty(0)

    def advance(self) -> Tensor | None:
        """Add a column for each hypothesis and return the bias; None if nothing is hidden."""
        begin, end = self.num_columns, self.num_columns + self.num_beams
        self.places = self.places + [self.num_words] * self.num_beams
        self.num_words += 1
        self.num_columns = end
        if self._bias is None:
            return None
        self._bias[..., begin:end] = self._own
        return self._bias[..., :end]

    def expand(self, num_beams: int) -> None:
        """Turn the single hypothesis of each item into several with the same past."""
        if self.num_beams != 1 or not 1 <= num_beams <= self.max_beams:
            raise ValueError(
                f"num_beams: expected 1 to {self.max_beams} from 1 hypothesis, "
                f"got {num_beams} from {self.num_beams}"
            )
        self.num_beams = num_beams
        if num_beams > 1:
            shape = (self.batch, 1, num_beams, self.max_columns)
            self._bias = torch.zeros(shape, dtype=self._dtype, device=self._device)
            others = ~torch.eye(num_beams, dtype=torch.bool, device=self._device)
            self._own = self._bias.new_zeros(others.shape).masked_fill(others, -torch.inf)

    def select(self, beams: Tensor) -> None:
        """Continue from the chosen hypotheses of each item, integers [batch, num_beams]."""
        if beams.shape != (self.batch, self.num_beams):
            raise ValueError(
                f"beams: expected {[self.batch, self.num_beams]}, got {list(beams.shape)}"
            )
        if self._bias is not None:
            past = self._bias[..., : self.num_columns]
            past.copy_(past.gather(2, beams[:, None, :, None].expand(past.shape)))


def as_bias(mask: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Return a mask [batch, positions] as a bias [batch, 1, 1, positions], 0 where True and −∞
    elsewhere, and a mask [batch, 1, 1, 1] of the items without any position. The bias hides nothing
    from these items, and their values must be 0."""
    if mask is None:
        return None, None
    is_dead = ~mask.any(dim=1, keepdim=True)
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    bias = bias.masked_fill(~(mask | is_dead), -torch.inf)
    return bias[:, None, None], is_dead[:, :, None, None]
