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

from attnkit.interpret.picture import save
from attnkit.interpret.quantity import Quantity
from attnkit.interpret.units.unit import Unit

MOST_SHOWN = 5


@dataclass(eq=False, repr=False)
class Explanation:
    """What a model's answer depends on, or where it looks: a number for each patch of images, for
    each patch and word of sentences, or for each edge of a graph.

    method: its name.
    unit: what has a number: `Patches`, `Words` or `Edges`, with what is asked of the model.
    target: the classes that are explained; for a method that knows of none, the predicted ones; of
        a captioner the sentences. Of a graph a single one, as of all that follows.
    predicted, logit, probability: the model's own class, and logit and `quantity` of `target`.
    quantity: what `probability` is: softmax, sigmoid, or what `of` asked for.
    notes: what was assumed or measured on the way, a sentence each.
    is_signed: whether negative numbers speak against the class.
    has_target: whether the method knows of the class.
    again: the method as a function of a model, its inputs and classes (sentences for a captioner),
        to a map as `map`, `words` or `edges`; None: the map was given without one.
    """

    method: str
    unit: Unit
    target: Annotated[Tensor, "*batch", int]
    predicted: Annotated[Tensor, "*batch", int]
    logit: Annotated[Tensor, "*batch"]
    probability: Annotated[Tensor, "*batch"]
    quantity: Quantity
    notes: list[str] = field(default_factory=list)
    is_signed: bool = False
    has_target: bool = True
    again: Callable[[nn.Module, Any, Tensor], Tensor] | None = None

    @property
    def model(self) -> nn.Module:
        """The model that was asked; of a module of a task the captioner in it."""
        return self.unit.target.model

    @property
    def share(self) -> Annotated[Tensor, "*batch"] | None:
        """What class and register tokens, or the self-loops that layers added, took of the sum of
        sizes; None where all tokens are patches."""
        return self.unit.share

    # --- images ---------------------------------------------------------------------------------

    @property
    def map(self) -> Annotated[Tensor, "batch map_height map_width"]:
        """On the model's own grid, in reading order, neither enlarged nor scaled; of a captioner
        the mean over the words."""
        return self._of("patch", "word").values

    @property
    def words(self) -> Annotated[Tensor, "batch words map_height map_width"] | None:
        """A map for each word of a captioner, 0 behind the end; None where there are no words."""
        return getattr(self.unit, "words", None)

    @property
    def tokens(self) -> Annotated[Tensor, "batch tokens"] | None:
        """The map with the class and register tokens; None where a method gives the image alone."""
        return self._of("patch", "word").tokens

    @property
    def num_prefix_tokens(self) -> int:
        """How many class and register tokens of `tokens` stand before the patches."""
        return self._of("patch", "word").num_prefix_tokens

    @property
    def num_suffix_tokens(self) -> int:
        """How many class, register and detection tokens of `tokens` stand behind the patches."""
        return self._of("patch", "word").num_suffix_tokens

    @property
    def images(self) -> Annotated[Tensor, "batch channels height width"]:
        """The images that were explained."""
        return self._of("patch", "word").target.images.detach()

    # --- graphs ---------------------------------------------------------------------------------

    @property
    def edges(self) -> Annotated[Tensor, "edges"]:
        """A number for each edge, in the caller's order."""
        return self._of("edge").values

    @property
    def edge_index(self) -> Annotated[Tensor, "2 edges", int]:
        """The edges, as they were given."""
        return self._of("edge").target.edge_index

    @property
    def candidates(self) -> Annotated[Tensor, "edges", bool]:
        """Which edges can change the answer at all; `edges` is 0 elsewhere."""
        return self._of("edge").target.candidates

    @property
    def index(self) -> int | tuple[int, ...] | None:
        """The node, or the pair of nodes, that was asked about; None: the graph."""
        return self._of("edge").target.index

    def top(self, k: int = MOST_SHOWN) -> list[Any]:
        """The k edges that rank first, of those that can reach the node: a list that is printed as
        a table.

        Raises:
            ValueError: k below 1.
        """
        return self._of("edge").top(k)

    # --- how far to trust it --------------------------------------------------------------------

    def trust(self, *args: Any, **options: Any) -> Any:
        """How far to trust the values, by what the answer loses without the units they rank first.

            print(attnkit.explain(vit, images).trust())
            print(attnkit.explain(captioner, images).trust())
            print(attnkit.explain(captioner, images).trust(image=0, word=3))
            print(attnkit.explain(gat, (x, edge_index), index=5).trust())

        Args:
            options: of images those of `attnkit.trust`: `masks`, `removals`, `full`, …, which gives
                a `Trust`. Of a captioner those of `trust_words`, and of one word, by `image` and
                `word`, those of `attnkit.trust`. Of a graph those of `fidelity`.

        Raises:
            TypeError, ValueError: as `attnkit.trust` or `attnkit.edge_fidelity`; an image or a word
                that is not there, or where there are no words.
        """
        if self.unit.name == "patch" and ("word" in options or "image" in options or args):
            raise ValueError("word: only the words of a captioner are judged one by one")
        return self.unit.trust(self, *args, **options)

    def trust_words(self, **options: Any) -> Any:
        """How far to trust the map of every word of a captioner's sentences, at once.

            print(attnkit.explain(captioner, images).trust_words())

        Each word has the gap of its map against random ones, and its probability without the
        region that the map ranks first, in a `WordTrust`. About 200 forwards an image of 36 regions
        and 12 words.

        Args:
            options: `full`, `fractions`, `orders`, `seed`, `batch_size`, as of `trust_words`.

        Raises:
            ValueError: what was explained has no words.
        """
        if self.unit.name != "word":
            raise ValueError("words: only a captioner's sentences have them; take trust()")
        return self.unit.trust(self, **options)

    def fidelity(self, ks: Sequence[int] | None = None, num_draws: int = 20, seed: int = 0) -> Any:
        """What a graph model predicts without the edges that rank first, and with these alone, an
        `EdgeFidelity`.

        Args and errors as of `attnkit.edge_fidelity`.
        """
        return self._of("edge").trust(self, ks=ks, num_draws=num_draws, seed=seed)

    # --- files ----------------------------------------------------------------------------------

    def draw(self, *args: Any, **options: Any) -> Figure:
        """A picture: images with their maps, sentences with a map a word, or a node with its edges.

        Args:
            names: the words of each sentence, of a captioner; None: their numbers.
            pictures: the images as people see them; None: as the model takes them.
            labels, class_names, fidelity, most: of a graph, as in `units.edge.Edges.draw`.
        """
        return self.unit.draw(self, *args, **options)

    def save(self, path: str | os.PathLike[str], *args: Any, **options: Any) -> Path:
        """Write a picture (.png, .pdf, .svg) or the arrays (.npz, .pt); returns the path.

        Args:
            options: of `draw`.

        Raises:
            ValueError: another ending; as `draw`.
        """
        path = Path(path)
        if path.suffix == ".npz":
            arrays: dict[str, Any] = {name: t.numpy() for name, t in self._arrays().items()}
            np.savez(path, **arrays)
        elif path.suffix == ".pt":
            torch.save(self._arrays(), path)
        elif path.suffix in (".png", ".pdf", ".svg"):
            save(path, self.draw(*args, **options))
        else:
            raise ValueError(
                f"path: expected .png, .pdf, .svg, .npz or .pt, got {path.suffix or path.name!r}"
            )
        return path

    def _arrays(self) -> dict[str, Tensor]:
        """The tensors, on the CPU, by name."""
        found = self.unit.arrays()
        found |= {} if self.share is None else {"share": self.share}
        for name in ("target", "predicted", "logit", "probability"):
            found[name] = getattr(self, name)
        return {name: tensor.cpu() for name, tensor in found.items()}

    def _of(self, *units: str) -> Any:
        """The unit, where it is one of these.

        Raises:
            AttributeError: it is not.
        """
        if self.unit.name not in units:
            raise AttributeError(
                f"an explanation of {self.unit.name}s has nothing of {' or '.join(units)}s"
            )
        return self.unit

    def __repr__(self) -> str:
        return "\n".join(self.unit.lines(self))
