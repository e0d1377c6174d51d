"""The question to a captioner: the logit of each word of a sentence, given the words before it."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.interpret.methods.question import Layers, Question, captioner_of, in_float
from attnkit.interpret.quantity import Of
from attnkit.interpret.trust.removal import as_pixels
from attnkit.models.captioning.word_decoder import PAD, START


class Sentences(Question):
    """Images and a sentence for each: y is the logit of each word, given the true words before it
    (teacher forcing).

    Attributes:
        captioner: the model, which takes images and words and returns logits of each next word.
        target: [batch, words], int, PAD after the end; if none were given, the likeliest sentences
            after `prepare`.
    """

    unit = "word"

    def __init__(
        self,
        model: nn.Module,
        images: Annotated[Tensor, "batch channels height width"],
        target: Annotated[Tensor, "batch words", int] | None = None,
        layers: Layers = None,
        of: Of = "probability",
    ) -> None:
        found = captioner_of(model)
        self.captioner: Any = model if found is None else found
        super().__init__(self.captioner, images, None, layers, of=of)
        self.forward = self.ask
        self.target = None if target is None else self._checked(target)

    @property
    def said(self) -> Annotated[Tensor, "batch words", int]:
        """The sentences."""
        assert self.target is not None
        return self.target

    @property
    def before(self) -> Annotated[Tensor, "batch words", int]:
        """The word before each word."""
        starts = self.said.new_full((len(self.said), 1), START)
        return torch.cat([starts, self.said[:, :-1]], dim=1)

    @property
    def is_word(self) -> Annotated[Tensor, "batch words", bool]:
        return self.said != PAD

    @property
    def places(self) -> tuple[int, int]:
        """Rows and columns of the captioner's memory of these images."""
        return grid_of(self.captioner, self.images)

    def prepare(self) -> None:
        """Generate the sentences if none were given, and store the logits of their words."""
        if self.target is None:
            self.target = self.captioner.generate(self.images.detach()).words
        if self.logits is None:
            with torch.no_grad():
                self.see(self.logits_of_words(self.images))

    def logits_of_words(
        self, images: Tensor, items: Annotated[Tensor, "_", int] | slice = slice(None)
    ) -> Annotated[Tensor, "_ words classes"]:
        """Return the logits at the position of each word, for the sentences of some items."""
        return in_float(self.captioner(images, self.before[items]))

    def without(
        self,
        items: Annotated[Tensor, "_", int],
        removed: Annotated[Tensor, "_ places", bool],
        *,
        grid: tuple[int, int],
        colour: Annotated[Tensor, "batch channels 1 1"],
    ) -> Annotated[Tensor, "_ words classes"]:
        """Return the logits of the words of some items, with removed places in one colour."""
        images = self.images.detach()
        pixels = as_pixels(removed, grid, (images.shape[2], images.shape[3]))
        return self.logits_of_words(torch.where(pixels, colour[items], images[items]), items)

    def ask(self, images: Tensor | None = None) -> Annotated[Tensor, "batch words"]:
        """Return the logit of each word."""
        logits = self.logits_of_words(self.images if images is None else images)
        return logits.gather(2, self.said[..., None])[..., 0]

    def _checked(self, said: Any) -> Tensor:
        size = getattr(getattr(self.captioner, "decoder", None), "vocabulary_size", None)
        if not isinstance(said, Tensor) or said.is_floating_point() or said.dtype == torch.bool:
            got = said.dtype if isinstance(said, Tensor) else type(said).__name__
            raise TypeError(
                f"target: expected sentences of a captioner as integers [batch, words], got {got}"
            )
        if said.ndim != 2 or len(said) != self.batch or not said.shape[1]:
            raise ValueError(
                f"target: expected sentences [{self.batch}, words], got {list(said.shape)}"
            )
        if bool((said < 0).any()) or (size is not None and bool((said >= size).any())):
            raise ValueError(
                f"target: expected words from 0 to {size - 1 if size else 'the last'}, got "
                f"{int(said.min())} to {int(said.max())}"
            )
        if bool((said[:, 0] == START).any()):
            raise ValueError("target: sentences begin with their first word, without START")
        with torch.inference_mode(False):  # inference tensors cannot be in a graph
            return said.to(self.images.device).long().clone()


def grid_of(captioner: Any, images: Tensor) -> tuple[int, int]:
    """Return rows and columns of a captioner's memory of images."""
    of_images = getattr(captioner, "grid_of", None)
    return captioner.grid if of_images is None else of_images(images)


class WordLogits(nn.Module):
    """A captioner as a classifier of the next word, given the words before it."""

    before: Tensor

    def __init__(self, captioner: nn.Module, before: Annotated[Tensor, "words", int]) -> None:
        super().__init__()
        self.captioner = captioner
        self.register_buffer("before", before[None])

    def forward(
        self, images: Annotated[Tensor, "batch channels height width"]
    ) -> Annotated[Tensor, "batch classes"]:
        """Return the logits of the next word."""
        return self.captioner(images, self.before.expand(len(images), -1))[:, -1]
