"""Decoding without a cache, to the same words."""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit.models.captioning.word_decoder import WordDecoder


class Recomputed:
    """A decoder without a cache: a step runs `forward` on all words so far."""

    def __init__(self, decoder: WordDecoder) -> None:
        self.decoder = decoder

    def start(
        self, memory: Tensor, memory_mask: Tensor | None, *, max_words: int, num_beams: int
    ) -> RecomputedState:
        return RecomputedState(memory, memory_mask)

    def step(self, words: Tensor, state: RecomputedState) -> Tensor:
        state.words = torch.cat([state.words, words[:, None]], dim=1)
        return self.decoder(state.memory, state.words, state.memory_mask)[:, -1]


class RecomputedState:
    """The words so far, and the memory of each hypothesis."""

    def __init__(self, memory: Tensor, memory_mask: Tensor | None) -> None:
        self.memory, self.memory_mask = memory, memory_mask
        self.words = torch.empty(len(memory), 0, dtype=torch.long, device=memory.device)

    def expand(self, num_beams: int) -> None:
        self.words = self.words.repeat_interleave(num_beams, dim=0)
        self.memory = self.memory.repeat_interleave(num_beams, dim=0)
        if self.memory_mask is not None:
            self.memory_mask = self.memory_mask.repeat_interleave(num_beams, dim=0)

    def select(self, beams: Tensor) -> None:
        first = torch.arange(len(beams), device=beams.device)[:, None] * beams.shape[1]
        self.words = self.words[(first + beams).flatten()]
