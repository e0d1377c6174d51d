"""Captioners: the question, the logit of each word given the words before it, and its methods."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.core.capture.calls import AttentionCall
from attnkit.core.capture.watch import watch_attention
from attnkit.interpret.methods.gradients import centred, drawn, sum_over
from attnkit.interpret.methods.occlusion import colours_of
from attnkit.interpret.methods.question import Layers, Question, captioner_of, in_float
from attnkit.interpret.methods.tokens import Step, chosen_layers
from attnkit.interpret.quantity import Of
from attnkit.interpret.trust.curves import answers_without_each
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


def attention(sentences: Sentences) -> Tensor:
    """Return the attention to the memory, the mean over heads, of the last layer or the chosen
    layers."""
    memory = sentences.captioner.encode(sentences.images)
    weights = sentences.captioner.decoder.word_weights(memory, sentences.before)
    names = [f"layer {number}" for number in range(weights.shape[1])]
    chosen = torch.tensor(chosen_layers(names, sentences.layers, -1))
    return weights[:, chosen.to(weights.device)].mean(dim=(1, 2)).unflatten(-1, sentences.places)


def relevance(sentences: Sentences) -> Tensor:
    """Gradient-weighted relevance of a Transformer decoder (Chefer et al. 2021), a word at a time.

        m ← m + r Ā_cross,   r ← r + r Ā_self        from the decoder's last layer down
        m ← m + m Ā_l                                from the encoder's, if it attends

    r, over words, starts as 1 at the position that predicts the word, and m, over positions of the
    memory, as 0: this is a row of their (6) and (7) for words and memory as one sequence. Unlike in
    their (10), the words' self-relevance does not multiply the cross-attention, and nothing is
    normalized. Gradients are those of the word's logit, with one backward for each word.
    """
    said = sentences.said
    with watch_attention(sentences.captioner) as calls:
        y = sentences.ask()
    encoder = [call for call in calls if call.layer.startswith("encoder.")]
    decoder = [call for call in calls if call.layer.startswith("decoder.")]
    pairs = _pairs(decoder, said.shape[1], sentences.places)
    steps = _encoder_steps(encoder, sentences)
    outputs = [call.output for pair in pairs for call in pair] + [s.call.output for s in steps]
    maps = []
    for place in range(said.shape[1]):
        gradients = iter(sentences.gradients(y[:, place], outputs, keep=True))
        of_pairs = [(next(gradients), next(gradients)) for _ in pairs]
        of_steps = list(gradients)
        r = torch.zeros(said.shape, dtype=torch.float32, device=said.device)
        r[:, place] = 1
        m = torch.zeros(len(said), pairs[0][1].num_keys, device=said.device)
        for (own, cross), (own_gradient, cross_gradient) in zip(
            reversed(pairs), reversed(of_pairs), strict=True
        ):
            m = m + cross.propagate(r, output_gradient=cross_gradient)
            r = r + own.propagate(r, output_gradient=own_gradient)
        for step, gradient in zip(reversed(steps), reversed(of_steps), strict=True):
            first = step.num_tokens - m.shape[1]
            m = nn.functional.pad(m, (first, 0))
            m = m + step.looked_at(m, gradient)
        maps.append(m[:, m.shape[1] - sentences.places[0] * sentences.places[1] :])
    return torch.stack(maps, dim=1).unflatten(-1, sentences.places)


def _pairs(
    calls: list[Any], num_words: int, grid: tuple[int, int]
) -> list[tuple[AttentionCall, AttentionCall]]:
    """Return self-attention over words and attention to the memory as pairs, layer by layer."""
    own, cross = calls[::2], calls[1::2]
    positions = grid[0] * grid[1]
    fits = len(own) == len(cross) > 0 and all(
        a.num_queries == a.num_keys == b.num_queries == num_words and b.num_keys == positions
        for a, b in zip(own, cross, strict=True)
    )
    if not fits:
        raise ValueError(
            "method: 'relevance' of sentences needs a decoder whose layers attend to the words and "
            "then to the image, as TransformerDecoder; take 'attention' or 'input_gradient'"
        )
    return list(zip(own, cross, strict=True))


def _encoder_steps(calls: list[Any], sentences: Sentences) -> list[Step]:
    """Return the encoder's attention if its tokens are the memory after a prefix, else []."""
    positions = sentences.places[0] * sentences.places[1]
    if not calls:
        sentences.notes.append("relevance ends at the encoder's output, which has no attention")
        return []
    num_tokens = calls[0].num_keys
    for call in calls:
        if (
            not call.num_queries == call.num_keys == num_tokens >= positions
            or len(call.query) != sentences.batch
            or not call.output.requires_grad
        ):
            sentences.notes.append(
                f"relevance ends at the encoder's output: tokens cannot be followed through "
                f"{call.layer!r}"
            )
            return []
    rows = torch.arange(num_tokens, device=calls[0].query.device)
    return [Step(call, rows, num_tokens) for call in calls]


def input_gradient(sentences: Sentences) -> Tensor:
    """Return Σ |∂y/∂x| over channels and the pixels of a position; one backward for each word."""
    images = sentences.images
    y = sentences.ask(images)
    maps = []
    for place in range(sentences.said.shape[1]):
        (gradient,) = sentences.gradients(y[:, place], [images], keep=True)
        maps.append(sum_over(gradient.abs().sum(dim=1), sentences.places))
    return torch.stack(maps, dim=1)


def occlusion(
    sentences: Sentences,
    *,
    baseline: float | Tensor | None = None,
    batch_size: int = 64,
) -> Tensor:
    """Return what the logit of each word loses when a position of the image has one colour."""
    grid, colour = sentences.places, colours_of(sentences.images.detach(), baseline)
    without = partial(sentences.without, grid=grid, colour=colour)
    y, _, _ = answers_without_each(sentences, without, grid[0] * grid[1], batch_size, "occlusion")
    return (y[0] - y[1:]).permute(1, 2, 0).unflatten(2, grid)


def random(sentences: Sentences, *, seed: int = 0) -> Tensor:
    return drawn((*sentences.said.shape, *sentences.places), seed).to(sentences.said.device)


def centre(sentences: Sentences, *, spread: float = 0.25) -> Tensor:
    bump = centred(*sentences.places, spread).to(sentences.said.device)
    return bump.expand(*sentences.said.shape, *sentences.places).clone()
