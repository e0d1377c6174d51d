"""What `attnkit.explain` returns."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from attnkit.interpret.colours import overlay_scale
from attnkit.interpret.layer_table import LayerTable
from attnkit.interpret.picture import Panel, Row, as_picture, draw, save
from attnkit.interpret.sentences import Sentences, captioner_of
from attnkit.interpret.trust.judge import trust
from attnkit.interpret.trust.result import Trust
from attnkit.interpret.trust.words import WordTrust, trust_words
from attnkit.models.captioning.word_decoder import PAD


@dataclass(eq=False, repr=False)
class Explanation:
    """Where a model looks, or what its answer depends on, for a batch of images.

    method: its name.
    map: on the model's own grid, in reading order; not enlarged and not scaled.
    tokens: the same with the class and register tokens before the patches; None where a method
        gives the image alone.
    num_prefix_tokens: how many tokens of `tokens` are not patches.
    target: the class that is explained; for a method that knows of none, the predicted class.
    predicted, logit, probability: the model's own class, and logit and softmax of `target`,
        or the sigmoid of a single logit.
    layers: a row for each layer and head of attention that was used; None for a method that does
        not look at attention.
    notes: what was assumed or measured on the way, a sentence each.
    is_signed: whether negative numbers speak against the class.
    has_target: whether the method knows of the class.
    words: of a captioner, a map for each word; `target` is then the sentence, and what belongs to
        it has a number for each word. `map` is the mean over the words.
    images, model: what was explained.
    again: the method as a function of a model, images and a class for each (sentences for a
        captioner, to maps of words); None: the map was given without one.
    one_word: of a captioner, the classifier of a word of an image's sentence.
    """

    method: str
    map: Annotated[Tensor, "batch map_height map_width"]
    tokens: Annotated[Tensor, "batch tokens"] | None
    num_prefix_tokens: int
    target: Annotated[Tensor, "batch *words", int]
    predicted: Annotated[Tensor, "batch *words", int]
    logit: Annotated[Tensor, "batch *words"]
    probability: Annotated[Tensor, "batch *words"]
    images: Annotated[Tensor, "batch channels height width"]
    model: nn.Module
    layers: LayerTable | None = None
    notes: list[str] = field(default_factory=list)
    is_signed: bool = False
    has_target: bool = True
    words: Annotated[Tensor, "batch words map_height map_width"] | None = None
    again: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None
    one_word: Callable[[int, int], nn.Module] | None = None

    @property
    def share(self) -> Annotated[Tensor, "batch"] | None:
        """The share of class and register tokens in the sum of sizes; None where all tokens are
        patches."""
        if self.tokens is None:
            return None
        total = self.tokens.abs().sum(dim=1)
        others = (total - self.map.abs().flatten(1).sum(dim=1)).clamp(min=0)
        return torch.where(total > 0, others / total, torch.zeros_like(total))

    def trust(self, image: int | None = None, word: int | None = None, **options: Any) -> Trust:
        """How far to trust the map: `attnkit.trust` of it, with its method.

            print(attnkit.explain(vit, images).trust())
            print(attnkit.explain(captioner, images).trust(image=0, word=3))

        Args:
            image, word: which word of a captioner's sentences is judged, behind those before it.
            options: of `attnkit.trust`: `masks`, `removals`, `full`, …

        Raises:
            TypeError, ValueError: as `attnkit.trust`; an image or a word that is not there, or
                where there are no words.
        """
        if self.words is not None:
            return self._trust_word(image, word, options)
        if image is not None or word is not None:
            raise ValueError("word: only the words of a captioner are judged one by one")
        known: dict[str, Any] = {"target": self.target, "map": self.map, "method": self.again}
        if self.tokens is not None:
            known["grid"] = tuple(self.map.shape[1:])  # of the patches, whether the model says so
        return trust(self.model, self.images, **known | options)

    def trust_words(self, **options: Any) -> WordTrust:
        """How far to trust the map of every word of a captioner's sentences, at once.

            print(attnkit.explain(captioner, images).trust_words())

        Each word has the gap of its map against random ones, and its probability without the
        region that the map ranks first. About 200 forwards an image of 36 regions and 12 words.

        Args:
            options: `full`, `fractions`, `orders`, `seed`, `batch_size`, as of `attnkit.trust`.

        Raises:
            ValueError: what was explained has no words.
        """
        if self.words is None:
            raise ValueError("words: only a captioner's sentences have them; take trust()")
        sentences = Sentences(captioner_of(self.model), self.target)
        return trust_words(sentences, self.images, self.words, **options)

    def _trust_word(self, image: int | None, word: int | None, options: dict[str, Any]) -> Trust:
        """A word as the class of one image, by the captioner behind the words before it."""
        assert self.words is not None
        number, length, *grid = self.words.shape
        for name, index, size in (("image", image, number), ("word", word, length)):
            if index is None or not 0 <= index < size:
                raise ValueError(f"{name}: expected one from 0 to {size - 1}, got {index}")
        assert image is not None
        assert word is not None
        assert self.again is not None
        assert self.one_word is not None
        if self.target[image, word] == PAD:
            raise ValueError(f"word: the sentence of image {image} ends before word {word}")
        if word + 1 >= grid[0] * grid[1] and "mask" in options.get("removals", ("mask",)):
            raise ValueError(
                f"word: behind {word} words, these and the {grid[0] * grid[1]} places of the image "
                "cannot be told apart by their number, to hide them; take removals=['mean']"
            )
        again, before = self.again, self.target[image : image + 1, :word]

        def of_word(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
            said = torch.cat([before, classes[:, None]], dim=1)
            return again(model.get_submodule("captioner"), images, said)[:, word]

        known: dict[str, Any] = {"target": self.target[image : image + 1, word]}
        known |= {"map": self.words[image : image + 1, word], "method": of_word, "grid": (*grid,)}
        model, images = self.one_word(image, word), self.images[image : image + 1]
        return trust(model, images, **known | options)

    def _arrays(self) -> dict[str, Tensor]:
        """The tensors, on the CPU, by name."""
        found = {
            "map": self.map,
            "words": self.words,
            "tokens": self.tokens,
            "share": self.share,
            "target": self.target,
            "predicted": self.predicted,
            "logit": self.logit,
            "probability": self.probability,
        }
        return {name: tensor.cpu() for name, tensor in found.items() if tensor is not None}

    def save(
        self, path: str | os.PathLike[str], names: Sequence[Sequence[str]] | None = None
    ) -> Path:
        """Write a picture (.png, .pdf, .svg) or the arrays (.npz, .pt); returns the path.

        Args:
            names: of `draw`.

        Raises:
            ValueError: another ending.
        """
        path = Path(path)
        if path.suffix == ".npz":
            arrays: dict[str, Any] = {name: t.numpy() for name, t in self._arrays().items()}
            np.savez(path, **arrays)
        elif path.suffix == ".pt":
            torch.save(self._arrays(), path)
        elif path.suffix in (".png", ".pdf", ".svg"):
            save(path, self.draw(names))
        else:
            raise ValueError(
                f"path: expected .png, .pdf, .svg, .npz or .pt, got {path.suffix or path.name!r}"
            )
        return path

    def draw(
        self,
        names: Sequence[Sequence[str]] | None = None,
        pictures: Annotated[Tensor, "batch channels height width"] | None = None,
    ) -> Figure:
        """A row for each image: the image with its prediction, and its map on it.

        The map lies on the image in light tones, each place of its own grid in one colour. Each
        image has its own scale, whose numbers stand beside it. Of a captioner there is a map for
        each word.

        Args:
            names: the words of each sentence, of a captioner; None: their numbers.
            pictures: the images as people see them; None: as the model takes them.
        """
        shown = self.images if pictures is None else pictures
        return draw([self._row(number, as_picture(one), names) for number, one in enumerate(shown)])

    def _row(self, number: int, picture: np.ndarray, names: Sequence[Any] | None) -> Row:
        maps, titles, label = self.map[number : number + 1], [""], self.method
        if self.words is not None:
            titles = [str(n) for n in self.target[number].tolist() if n != PAD]
            given = names[number] if names else []
            titles[: len(given)] = given[: len(titles)]
            maps, label = self.words[number, : len(titles)], f"{label}, one scale for all words"
        panels = [Panel(picture, *one) for one in zip(maps, titles, strict=True)]
        says = Panel(picture, title=self._line(number).replace("; ", "\n"))
        return Row([says, *panels], overlay_scale(maps, is_signed=self.is_signed), label)

    def _line(self, number: int) -> str:
        if self.words is not None:
            said = self.target[number] != PAD
            mean = float(self.probability[number][said].mean()) if said.any() else 0.0
            return f"{int(said.sum())} words, mean p = {mean:.3f}"
        target, predicted = int(self.target[number]), int(self.predicted[number])
        model = "predicted" if target == predicted else f"predicted {predicted}"
        parts = [f"class {target} ({model}), p = {float(self.probability[number]):.3f}"]
        if not self.has_target:
            parts[0] += " (the map does not depend on the class)"
        if self.share is not None and self.num_prefix_tokens:
            parts.append(f"class and register tokens: {100 * float(self.share[number]):.0f} %")
        return "; ".join(parts)

    def __repr__(self) -> str:
        batch, rows, columns = self.map.shape
        lines = [f"{self.method} of {batch} image{'s' * (batch > 1)} on {rows} x {columns}"]
        for number in range(min(batch, 4)):
            one = self.map[number]
            row, column = divmod(int(one.argmax()), columns)
            lines.append(
                f"  {number}: {self._line(number)}; largest {float(one.max()):.3g} at row {row}, "
                f"column {column}"
            )
        if batch > 4:
            lines.append(f"  … {batch - 4} more")
        return "\n".join([*lines, *(f"  ({note})" for note in self.notes)])
