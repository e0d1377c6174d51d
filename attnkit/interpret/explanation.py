"""The result of `attnkit.explain`."""

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
from attnkit.interpret.units import Edges, Patches

MOST_SHOWN = 5


@dataclass(eq=False, repr=False)
class Explanation:
    """What a model's answer depends on, or where the model looks: a number for each patch of
    images, for each patch and word of sentences, or for each edge of a graph.

    method: name of the method.
    unit: the units that have a number, `Patches`, `Words` or `Edges`, and the question they answer.
    target: the explained classes; for a method that does not use the class, the predicted ones; for
        a captioner, the sentences. A graph has a single one, also of the following values.
    predicted, logit, probability: the predicted class, and the logit and `quantity` of `target`.
    quantity: what `probability` is: softmax, sigmoid, or as chosen by `of`.
    notes: what was assumed or measured, in sentences.
    is_signed: whether negative numbers are evidence against the class.
    has_target: whether the method uses the class.
    again: the method as a function of a model, its inputs and classes (sentences for a captioner)
        that returns a map like `map`, `words` or `edges`; None if the user passed a finished map.
    """

    method: str
    unit: Patches | Edges
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
        """The explained model; for a task's module that holds a captioner, the captioner."""
        return self.unit.target.model

    @property
    def share(self) -> Annotated[Tensor, "*batch"] | None:
        """Share of the sum of absolute values that belongs to class and register tokens, or to
        self-loops that layers added; None if all tokens are patches."""
        return self.unit.share

    # --- images ---------------------------------------------------------------------------------

    @property
    def map(self) -> Annotated[Tensor, "batch map_height map_width"]:
        """The map on the model's own grid, neither enlarged nor scaled; for a captioner the mean
        over the words."""
        return self._of("patch", "word").values

    @property
    def words(self) -> Annotated[Tensor, "batch words map_height map_width"] | None:
        """A map for each word of a captioner, 0 after the end of the sentence; None for images."""
        return getattr(self.unit, "words", None)

    @property
    def tokens(self) -> Annotated[Tensor, "batch tokens"] | None:
        """The map with the class and register tokens; None if the method gives only the image."""
        return self._of("patch", "word").tokens

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class and register tokens in `tokens` before the patches."""
        return self._of("patch", "word").num_prefix_tokens

    @property
    def num_suffix_tokens(self) -> int:
        """Number of class, register and detection tokens in `tokens` after the patches."""
        return self._of("patch", "word").num_suffix_tokens

    @property
    def images(self) -> Annotated[Tensor, "batch channels height width"]:
        """The explained images."""
        return self._of("patch", "word").target.images.detach()

    # --- graphs ---------------------------------------------------------------------------------

    @property
    def edges(self) -> Annotated[Tensor, "edges"]:
        """A number for each edge, in the caller's order."""
        return self._of("edge").values

    @property
    def edge_index(self) -> Annotated[Tensor, "2 edges", int]:
        """The edges as they were passed."""
        return self._of("edge").target.edge_index

    @property
    def candidates(self) -> Annotated[Tensor, "edges", bool]:
        """Which edges can change the answer; `edges` is 0 for all others."""
        return self._of("edge").target.candidates

    @property
    def index(self) -> int | tuple[int, ...] | None:
        """The explained node or pair of nodes; None: the whole graph."""
        return self._of("edge").target.index

    def top(self, k: int = MOST_SHOWN) -> list[Any]:
        """Return the k highest-ranked edges that can reach the node, as a list that prints as a
        table.

        Raises:
            ValueError: k below 1.
        """
        return self._of("edge").top(k)

    # --- trust ----------------------------------------------------------------------------------

    def trust(self, *args: Any, **options: Any) -> Any:
        """Measure how far to trust the values: what the answer loses without the top-ranked units.

            print(attnkit.explain(vit, images).trust())
            print(attnkit.explain(captioner, images).trust())
            print(attnkit.explain(captioner, images).trust(image=0, word=3))
            print(attnkit.explain(gat, (x, edge_index), index=5).trust())

        Args:
            options: for images the options of `attnkit.trust` (`masks`, `removals`, `full`, …); the
                result is a `Trust`. For a captioner those of `trust_words`, or with `image` and
                `word`, for one word, those of `attnkit.trust`. For a graph those of `fidelity`.

        Raises:
            TypeError, ValueError: as `attnkit.trust` or `attnkit.edge_fidelity`; an image or a word
                that does not exist.
        """
        if self.unit.name == "patch" and ("word" in options or "image" in options or args):
            raise ValueError("word: only a captioner's explanation has words; leave it out")
        return self.unit.trust(self, *args, **options)

    def trust_words(self, **options: Any) -> Any:
        """Measure how far to trust the maps of all words of a captioner's sentences at once.

            print(attnkit.explain(captioner, images).trust_words())

        The result, a `WordTrust`, has for each word the perturbation gap of its map beside that of
        random maps, and its probability without the top-ranked region. An image of 36 regions and
        12 words takes about 200 forwards.

        Args:
            options: `full`, `fractions`, `orders`, `seed`, `batch_size`, as in `trust_words`.

        Raises:
            ValueError: the explanation has no words.
        """
        if self.unit.name != "word":
            raise ValueError("words: only a captioner's explanation has words; use trust()")
        return self.unit.trust(self, **options)

    def fidelity(self, ks: Sequence[int] | None = None, num_draws: int = 20, seed: int = 0) -> Any:
        """Return the `EdgeFidelity`: a graph model's predictions without the top-ranked edges, and
        with only these.

        Arguments and errors are those of `attnkit.edge_fidelity`.
        """
        return self._of("edge").trust(self, ks=ks, num_draws=num_draws, seed=seed)

    # --- files ----------------------------------------------------------------------------------

    def draw(self, *args: Any, **options: Any) -> Figure:
        """Draw images with their maps, sentences with a map for each word, or a node with its
        edges.

        Args:
            names: for a captioner, the words of each sentence; None: their token numbers.
            pictures: images to draw instead of the model's (normalized) inputs.
            labels, class_names, fidelity, most: for a graph, as in `units.Edges.draw`.
        """
        return self.unit.draw(self, *args, **options)

    def save(self, path: str | os.PathLike[str], *args: Any, **options: Any) -> Path:
        """Write a picture (.png, .pdf, .svg) or the arrays (.npz, .pt); return the path.

        Args:
            options: options of `draw`.

        Raises:
            ValueError: another file extension; errors of `draw`.
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
        """Return the tensors on the CPU by name."""
        arrays = self.unit.arrays()
        arrays |= {} if self.share is None else {"share": self.share}
        for name in ("target", "predicted", "logit", "probability"):
            arrays[name] = getattr(self, name)
        return {name: tensor.cpu() for name, tensor in arrays.items()}

    def _of(self, *units: str) -> Any:
        """Return the unit if its name is one of `units`.

        Raises:
            AttributeError: it is another unit.
        """
        if self.unit.name not in units:
            raise AttributeError(
                f"an explanation of {self.unit.name}s has no values of {' or '.join(units)}s"
            )
        return self.unit

    def __repr__(self) -> str:
        return "\n".join(self.unit.lines(self))
