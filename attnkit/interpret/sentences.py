"""A captioner forced to given sentences, and its logit for each word."""

from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.models.captioning.word_decoder import PAD, START


class Sentences:
    """A captioner and given sentences: each word is predicted from the given words before it.

    Attributes:
        captioner: takes images and words, and returns of each word the logits of the next.
        said: [batch, words], int; PAD behind the end.
    """

    def __init__(self, captioner: Any, said: Annotated[Tensor, "batch words", int]) -> None:
        self.captioner = captioner
        self.said = said

    @property
    def before(self) -> Annotated[Tensor, "batch words", int]:
        """The word before each."""
        starts = self.said.new_full((len(self.said), 1), START)
        return torch.cat([starts, self.said[:, :-1]], dim=1)

    @property
    def is_word(self) -> Annotated[Tensor, "batch words", bool]:
        return self.said != PAD

    @property
    def grid(self) -> tuple[int, int]:
        return self.captioner.grid

    def logits(self, images: Tensor) -> Tensor:
        """Of each word what could stand there, [batch, words, vocabulary]; of n copies of the
        batch, one after the other, n times as many."""
        return self.captioner(images, self.before.repeat(self._copies(images), 1))

    def ask(self, images: Tensor) -> Tensor:
        """The logit of each word, [batch, words]; of n copies of the batch, n times as many."""
        return self._chosen(self.logits(images), images)

    def probability(self, images: Tensor) -> Tensor:
        """The probability of each word, as `ask`."""
        return self._chosen(self.logits(images).float().softmax(dim=2), images)

    def _chosen(self, values: Tensor, images: Tensor) -> Tensor:
        said = self.said.repeat(self._copies(images), 1)
        return values.gather(2, said[..., None])[..., 0]

    def _copies(self, images: Tensor) -> int:
        return len(images) // len(self.said)


class WordLogits(nn.Module):
    """A captioner as a classifier of the next word, behind the words before it."""

    before: Tensor

    def __init__(self, captioner: nn.Module, before: Annotated[Tensor, "words", int]) -> None:
        super().__init__()
        self.captioner = captioner
        self.register_buffer("before", before[None])

    def forward(
        self, images: Annotated[Tensor, "batch channels height width"]
    ) -> Annotated[Tensor, "batch classes"]:
        """The logits of the next word."""
        return self.captioner(images, self.before.expand(len(images), -1))[:, -1]


def captioner_of(model: nn.Module) -> Any:
    """The captioner that a model is, or that a module of a task holds; None: neither."""
    for found in (model, getattr(model, "model", None)):
        if callable(getattr(getattr(found, "decoder", None), "word_weights", None)):
            return found
    return None
