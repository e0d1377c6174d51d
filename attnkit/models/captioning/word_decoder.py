"""The base of all decoders of words: teacher forcing, decoding step by step, loss."""

from typing import Annotated, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.arguments import at_least, share

Memory = Annotated[Tensor, "batch positions memory_dim"]
MemoryMask = Annotated[Tensor, "batch positions", bool] | None
Words = Annotated[Tensor, "batch words", int]
Logits = Annotated[Tensor, "batch words vocabulary_size"]

PAD, START, END, UNKNOWN = 0, 1, 2, 3
"""The special words; the tokenizers give them the same numbers."""


class DecodingState(Protocol):
    """What a decoder keeps between steps, for one or several hypotheses of each item."""

    def expand(self, num_beams: int) -> None:
        """From one hypothesis of each item to that many, all the same."""

    def select(self, beams: Tensor) -> None:
        """Continue from some hypotheses: integers [batch, num_beams], numbers within the item."""


class WordDecoder(nn.Module):
    """Base of the decoders: next words from a memory and the words so far.

    A memory is [batch, positions, memory_dim], what an encoder made of an image or a sentence.
    Words are integers, `PAD` 0, `START` 1, `END` 2, `UNKNOWN` 3 and the vocabulary's own; a
    sentence is START, words, END and then PAD.

        logits = decoder(memory, words[:, :-1])        teacher forcing, all words at once

        state = decoder.start(memory)                  one by one, the same logits
        logits = decoder.step(words[:, 0], state)

    Subclasses define `forward`, `start`, `step` and `word_weights`.

    Args:
        vocabulary_size: how many words, the four above included.
        max_words: the longest sentence in words, END included.
        memory_dim: channels of the memory.
        label_smoothing: of the cross-entropy in training (Szegedy et al. 2016).

    Raises:
        ValueError: sizes that do not fit or are not positive, unknown choices.
    """

    def __init__(
        self, vocabulary_size: int, max_words: int, memory_dim: int, label_smoothing: float
    ) -> None:
        super().__init__()
        at_least(UNKNOWN + 1, vocabulary_size=vocabulary_size)
        at_least(1, max_words=max_words, memory_dim=memory_dim)
        share(label_smoothing=label_smoothing)
        self.vocabulary_size = vocabulary_size
        self.max_words = max_words
        self.memory_dim = memory_dim
        self.label_smoothing = label_smoothing

    def forward(self, memory: Memory, words: Words, memory_mask: MemoryMask = None) -> Logits:
        """The logits of the next word, after each word.

        Args:
            words: beginning with START.
            memory_mask: True = there; None: all are.
        """
        raise NotImplementedError

    def start(
        self,
        memory: Memory,
        memory_mask: MemoryMask = None,
        *,
        max_words: int | None = None,
        num_beams: int = 1,
    ) -> Any:
        """The state before the first word, which holds the projected memory.

        Args:
            max_words: how many steps there will be at most; None: as many as the decoder can.
            num_beams: the most hypotheses of an item, the largest argument of `expand`.
        """
        raise NotImplementedError

    def step(
        self, words: Annotated[Tensor, "hypotheses", int], state: Any
    ) -> Annotated[Tensor, "hypotheses vocabulary_size"]:
        """The logits after one more word of each hypothesis; the state advances."""
        raise NotImplementedError

    def word_weights(
        self, memory: Memory, words: Words, memory_mask: MemoryMask = None
    ) -> Annotated[Tensor, "batch layers heads words positions"]:
        """The attention to the memory at the word after each of `words`: [batch, layers, heads,
        words, positions]. Arguments as of `forward`."""
        raise NotImplementedError

    def loss(
        self, memory: Memory, words: Words, memory_mask: MemoryMask = None
    ) -> dict[str, Annotated[Tensor, ""]]:
        """The loss to minimize, "loss", and its terms by name, unweighted.

        "cross_entropy" is −log p(word | words before), mean over all words of the batch that are
        not PAD, smoothed in training only.

        Args:
            words: sentences with START.
        """
        logits = self(memory, words[:, :-1], memory_mask)
        cross_entropy = self.word_losses(logits, words).sum() / num_words(words)
        return {"loss": cross_entropy, "cross_entropy": cross_entropy}

    def word_losses(
        self, logits: Logits, words: Annotated[Tensor, "batch words+1", int]
    ) -> Annotated[Tensor, "batch words"]:
        """The cross-entropy of each word but START; 0 where it is PAD."""
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            words[:, 1:].flatten(),
            ignore_index=PAD,
            label_smoothing=self.label_smoothing if self.training else 0.0,
            reduction="none",
        )
        return losses.view(logits.shape[:2])

    def check(self, memory: Memory, words: Words | None, memory_mask: MemoryMask) -> None:
        """ValueError where arguments do not fit."""
        if memory.ndim != 3 or memory.shape[2] != self.memory_dim:
            raise ValueError(
                f"memory: expected [batch, positions, {self.memory_dim}], got {list(memory.shape)}"
            )
        if not memory.shape[1]:
            raise ValueError("memory: expected at least one position, got none")
        if memory_mask is not None and (
            memory_mask.dtype != torch.bool or memory_mask.shape != memory.shape[:2]
        ):
            raise ValueError(
                f"memory_mask: expected booleans {list(memory.shape[:2])}, True = there, "
                f"got {memory_mask.dtype} {list(memory_mask.shape)}"
            )
        if words is None:
            return
        if words.ndim != 2 or words.shape[0] != memory.shape[0] or words.is_floating_point():
            raise ValueError(
                f"words: expected integers [{len(memory)}, words], "
                f"got {words.dtype} {list(words.shape)}"
            )
        if not words.shape[1]:
            raise ValueError("words: expected at least START, got none")
        if words.shape[1] > self.max_words:
            raise ValueError(
                f"words: expected at most max_words = {self.max_words}, got {words.shape[1]}"
            )


def num_words(words: Tensor) -> Tensor:
    """How many words, START and PAD not counted; 1 if there are none."""
    return (words[:, 1:] != PAD).sum().clamp(min=1)


def without_pad_and_start(logits: Tensor) -> Tensor:
    """The logits [batch, words] with those of PAD and START −∞, in float32 or float64; written in
    place if that is their dtype."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits[:, : max(PAD, START) + 1] = -torch.inf
    return logits
