"""Base class of the decoders of words: teacher forcing, step-by-step decoding, loss."""

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
    """The state that a decoder keeps between steps, for one or several hypotheses of each item."""

    def expand(self, num_beams: int) -> None:
        """Turn the single hypothesis of each item into `num_beams` equal ones."""

    def select(self, beams: Tensor) -> None:
        """Continue from the chosen hypotheses: integers [batch, num_beams], counted by item."""


class WordDecoder(nn.Module):
    """Base class of the decoders, which predict the next word from a memory and the words so far.

    A memory [batch, positions, memory_dim] is the encoding of an image or a sentence. Words are
    integers: `PAD` 0, `START` 1, `END` 2, `UNKNOWN` 3, then the vocabulary. A sentence is START,
    words, END, then PAD.

        logits = decoder(memory, words[:, :-1])        teacher forcing, all words at once

        state = decoder.start(memory)                  one by one, the same logits
        logits = decoder.step(words[:, 0], state)

    Subclasses define `forward`, `start`, `step` and `word_weights`.

    Args:
        vocabulary_size: number of words, the four above included.
        max_words: longest sentence in words, END included.
        memory_dim: channels of the memory.
        label_smoothing: smoothing of the cross-entropy in training (Szegedy et al. 2016).

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
        """Return the logits of the next word after each word.

        Args:
            words: sentences that begin with START.
            memory_mask: True where a position exists; None: everywhere.
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
        """Return the state before the first word, which holds the projected memory.

        Args:
            max_words: largest number of steps; None: the decoder's `max_words`.
            num_beams: largest number of hypotheses of an item, for `expand`.
        """
        raise NotImplementedError

    def step(
        self, words: Annotated[Tensor, "hypotheses", int], state: Any
    ) -> Annotated[Tensor, "hypotheses vocabulary_size"]:
        """Return the logits after one more word of each hypothesis, and advance the state."""
        raise NotImplementedError

    def word_weights(
        self, memory: Memory, words: Words, memory_mask: MemoryMask = None
    ) -> Annotated[Tensor, "batch layers heads words positions"]:
        """Return the attention to the memory when the word after each of `words` is predicted:
        [batch, layers, heads, words, positions]. The arguments are those of `forward`."""
        raise NotImplementedError

    def loss(
        self, memory: Memory, words: Words, memory_mask: MemoryMask = None
    ) -> dict[str, Annotated[Tensor, ""]]:
        """Return the loss to minimize, "loss", and its terms by name, unweighted.

        "cross_entropy" is the mean of −log p(word | words before) over all words of the batch that
        are not PAD, smoothed in training only.

        Args:
            words: sentences that begin with START.
        """
        logits = self(memory, words[:, :-1], memory_mask)
        cross_entropy = self.word_losses(logits, words).sum() / num_words(words)
        return {"loss": cross_entropy, "cross_entropy": cross_entropy}

    def word_losses(
        self, logits: Logits, words: Annotated[Tensor, "batch words+1", int]
    ) -> Annotated[Tensor, "batch words"]:
        """Return the cross-entropy of each word except START; 0 at PAD."""
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            words[:, 1:].flatten(),
            ignore_index=PAD,
            label_smoothing=self.label_smoothing if self.training else 0.0,
            reduction="none",
        )
        return losses.view(logits.shape[:2])

    def check(self, memory: Memory, words: Words | None, memory_mask: MemoryMask) -> None:
        """Raise ValueError if the arguments do not fit."""
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
    """Return the number of words without START and PAD, at least 1."""
    return (words[:, 1:] != PAD).sum().clamp(min=1)


def without_pad_and_start(logits: Tensor) -> Tensor:
    """Return the logits [batch, words] with −∞ for PAD and START, in float32 or float64; logits of
    that dtype are changed in place."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits[:, : max(PAD, START) + 1] = -torch.inf
    return logits
