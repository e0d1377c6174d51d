"""The units of an explanation: patches, words and edges, with their trust and their drawing."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from attnkit.core.arguments import at_least
from attnkit.interpret.console import text_table
from attnkit.interpret.graph_picture import (
    MOST_RANKED,
    draw_fidelity,
    draw_graph,
    ego_graph,
    empty_figure,
)
from attnkit.interpret.methods.graph_question import GraphQuestion, steps_to
from attnkit.interpret.methods.grid import find_grid
from attnkit.interpret.methods.question import Question, looking
from attnkit.interpret.methods.words import Sentences, WordLogits
from attnkit.interpret.picture import Panel, Row, as_picture, draw, overlay_scale
from attnkit.interpret.trust.edges import EdgeFidelity, fidelity_of
from attnkit.interpret.trust.judge import trust
from attnkit.interpret.trust.words import trust_words
from attnkit.lightning.console import in_picture

if TYPE_CHECKING:
    from attnkit.interpret.explanation import Explanation
    from attnkit.interpret.trust.result import Trust


MOST_LINES = 4
"""Number of images that have a line each; the others are counted."""


class Patches:
    """The patches of images, as the unit of an explanation.

    Attributes:
        name: "patch", or "word" for the subclass.
        target: the question.
        values: [batch, rows, columns].
        share: share of the sum of absolute values of tokens that are no patches; None: all are.
        tokens: [batch, tokens], with the class and register tokens; None if the method gives only
            the image.
        num_prefix_tokens, num_suffix_tokens: number of tokens before and after the patches.
    """

    name = "patch"
    target: Question

    def __init__(self, target: Question, found: Tensor) -> None:
        self.target, self.values = target, found
        self.share: Annotated[Tensor, "batch"] | None = None
        self.tokens: Tensor | None = None
        self.num_prefix_tokens = self.num_suffix_tokens = 0
        if found.ndim == 3:
            return
        if target.chain is not None:
            grid = target.chain.grid
        else:
            number = found.shape[1]
            given = target.grid, target.num_prefix_tokens
            grid = find_grid(target.model, target.images, number, *given)
        self.values = grid.image(found)
        self.tokens = found
        self.num_prefix_tokens = grid.num_prefix_tokens
        self.num_suffix_tokens = grid.num_suffix_tokens
        if grid.num_others:
            total, others = found.abs().sum(dim=1), grid.others(found).abs().sum(dim=1)
            self.share = torch.where(total > 0, others / total, torch.zeros_like(total))

    def trust(self, seen: Explanation, **options: Any) -> Trust:
        """Compute `attnkit.trust` of the map."""
        known: dict[str, Any] = {"target": seen.target, "map": self.values, "method": seen.again}
        known["of"] = self.target.of
        if self.tokens is not None:
            known["grid"] = tuple(self.values.shape[1:])  # also if the model does not declare it
        return trust(self.target.model, self.target.images.detach(), **known | options)

    def arrays(self) -> dict[str, Tensor]:
        """Return the map, and the tokens with their prefix."""
        return {"map": self.values} | ({} if self.tokens is None else {"tokens": self.tokens})

    def draw(
        self,
        seen: Explanation,
        names: Sequence[Sequence[str]] | None = None,
        pictures: Annotated[Tensor, "batch channels height width"] | None = None,
    ) -> Figure:
        """Draw a row for each image: the image with its prediction, and the image with its map.

        The map is drawn on the light image, with one colour for each place of its grid. Each image
        has its own scale, drawn beside it.

        Args:
            names: words, for captioners; not used here.
            pictures: images to draw instead of the model's (normalized) inputs.
        """
        shown = self.target.images.detach() if pictures is None else pictures
        return draw(
            [self._row(seen, number, as_picture(one), names) for number, one in enumerate(shown)]
        )

    def lines(self, seen: Explanation) -> list[str]:
        """Return what was explained, and a line for each of the first images."""
        batch, rows, columns = seen.map.shape
        lines = [f"{seen.method} of {batch} image{'s' * (batch > 1)} on {rows} x {columns}"]
        for number in range(min(batch, MOST_LINES)):
            one = seen.map[number]
            row, column = divmod(int(one.argmax()), columns)
            lines.append(
                f"  {number}: {self.line(seen, number)}; largest {float(one.max()):.3g} at row "
                f"{row}, column {column}"
            )
        if batch > MOST_LINES:
            lines.append(f"  … {batch - MOST_LINES} more")
        return [*lines, *(f"  ({note})" for note in seen.notes)]

    def line(self, seen: Explanation, number: int) -> str:
        """Return the question and the model's answer for an image."""
        target, predicted = int(seen.target[number]), int(seen.predicted[number])
        model = "predicted" if target == predicted else f"predicted {predicted}"
        number_of = f"{seen.quantity.symbol} = {float(seen.probability[number]):.3f}"
        parts = [f"class {target} ({model}), {number_of}"]
        if not seen.has_target:
            parts[0] += " (the map does not depend on the class)"
        if self.share is not None:
            parts.append(f"class and register tokens: {100 * float(self.share[number]):.0f} %")
        return "; ".join(parts)

    def _panels(self, seen: Explanation, number: int, names: Any) -> tuple[Tensor, list[str], str]:
        """Return the maps of an image, their titles and the label of their scale."""
        return self.values[number : number + 1], [""], seen.method

    def _row(self, seen: Explanation, number: int, picture: np.ndarray, names: Any) -> Row:
        maps, titles, label = self._panels(seen, number, names)
        panels = [Panel(picture, *one) for one in zip(maps, titles, strict=True)]
        says = Panel(picture, title=self.line(seen, number).replace("; ", "\n"))
        return Row([says, *panels], overlay_scale(maps, is_signed=seen.is_signed), label)


class Words(Patches):
    """The patches of images for each word of a sentence.

    Attributes:
        words: [batch, words, rows, columns], 0 after the end of the sentence.
        values: [batch, rows, columns], the mean over the words.
    """

    name = "word"
    target: Sentences

    def __init__(self, target: Sentences, found: Tensor) -> None:
        self.words = found * target.is_word[..., None, None]
        number = target.is_word.sum(dim=1).clamp(min=1)
        super().__init__(target, self.words.sum(dim=1) / number[:, None, None])

    def trust(
        self,
        seen: Explanation,
        image: int | None = None,
        word: int | None = None,
        **options: Any,
    ) -> Any:
        """Compute `attnkit.trust` of one word of one image, given the words before it, as a class.

        Without `image` and `word` it is `trust_words` of all words.
        """
        if image is None and word is None:
            return trust_words(self.target, self.words, **options)
        number, length, *grid = self.words.shape
        for name, index, size in (("image", image, number), ("word", word, length)):
            if index is None or not 0 <= index < size:
                raise ValueError(f"{name}: expected one from 0 to {size - 1}, got {index}")
        assert image is not None
        assert word is not None
        if not self.target.is_word[image, word]:
            raise ValueError(f"word: the sentence of image {image} ends before word {word}")
        if word + 1 >= grid[0] * grid[1] and "mask" in options.get("removals", ("mask",)):
            raise ValueError(
                f"word: behind {word} words, these and the {grid[0] * grid[1]} places of the image "
                "cannot be told apart by their number, to hide them; take removals=['mean']"
            )
        assert seen.again is not None
        again, said = seen.again, self.target.said[image : image + 1]

        def of_word(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
            other = torch.cat([said[:, :word], classes[:, None]], dim=1)
            return again(model.get_submodule("captioner"), images, other)[:, word]

        known: dict[str, Any] = {"target": said[:, word], "method": of_word, "grid": (*grid,)}
        known |= {"map": self.words[image : image + 1, word], "of": self.target.of}
        model = WordLogits(self.target.captioner, self.target.before[image, : word + 1])
        return trust(model, self.target.images.detach()[image : image + 1], **known | options)

    def arrays(self) -> dict[str, Tensor]:
        """Return the maps of the words, and their mean."""
        return {"map": self.values, "words": self.words}

    def line(self, seen: Explanation, number: int) -> str:
        """Return the number of words of a sentence, and their mean probability."""
        said = self.target.is_word[number]
        mean = float(seen.probability[number][said].mean()) if said.any() else 0.0
        return f"{int(said.sum())} words, mean {seen.quantity.symbol} = {mean:.3f}"

    def _panels(self, seen: Explanation, number: int, names: Any) -> tuple[Tensor, list[str], str]:
        said = self.target.is_word[number]
        titles = [str(word) for word in self.target.said[number][said].tolist()]
        given = names[number] if names else []
        titles[: len(given)] = given[: len(titles)]
        return self.words[number, : len(titles)], titles, f"{seen.method}, one scale for all words"


class EdgeRow(NamedTuple):
    """A row of the table of edges.

    score: the edge's number.
    share: its share of the sum of absolute values.
    steps: length of the shortest path from its source to the node, or to the nearer node of a pair
        (1: a neighbour); None for a whole graph.
    """

    source: int
    target: int
    score: float
    share: float
    steps: int | None


class EdgeTable(list[EdgeRow]):
    """A list of `EdgeRow`, which is printed as a table."""

    def __repr__(self) -> str:
        rows = [["edge", "score", "share", "steps"]]
        for source, target, score, share, steps in self:
            numbers = f"{score:.4g}", f"{share:.0%}", "" if steps is None else str(steps)
            rows.append([f"{source} → {target}", *numbers])
        return text_table(rows, num_left=4)


class Edges:
    """The edges of a graph, in the caller's order, as the unit of an explanation.

    Attributes:
        name: "edge".
        target: the question.
        values: [edges]; 0 if an edge cannot reach the node.
        share: share of the self-loops that layers added.
    """

    name = "edge"
    target: GraphQuestion

    def __init__(self, target: GraphQuestion, found: Tensor) -> None:
        self.target, self.values = target, found[:-1]
        loops, total = found[-1].abs(), found.abs().sum()
        self.share = torch.where(total > 0, loops / total, torch.zeros_like(total))

    def trust(self, seen: Explanation, **options: Any) -> EdgeFidelity:
        """Compute the fidelity, compared with random edges."""
        with looking(self.target.model), torch.no_grad():
            return fidelity_of(self.target, self.values, **options)

    def top(self, k: int) -> EdgeTable:
        """Return the k highest-ranked edges that can reach the node."""
        at_least(1, k=k)
        index, edge_index = self.target.index, self.target.edge_index
        places = self.target.candidates.nonzero()[:, 0]
        places = places[self.values[places].argsort(descending=True, stable=True)][:k]
        steps = steps_to(index, edge_index)
        return EdgeTable(
            EdgeRow(
                source,
                target,
                score,
                self.part(score),
                None if index is None else int(steps[source]),
            )
            for source, target, score in zip(
                *edge_index[:, places].tolist(), self.values[places].tolist(), strict=True
            )
        )

    def part(self, score: float) -> float:
        """Return a number's share of the sum of absolute values, added self-loops included."""
        share, total = float(self.share), float(self.values.abs().sum())
        return abs(score) * (1 - share) / total if total else 0.0

    def classes(self, labels: Tensor | None = None) -> list[int]:
        """Return the classes that colour the nodes: labels or predictions; empty: no colours.

        Raises:
            ValueError: labels that are not one class for each node.
        """
        is_class = isinstance(self.target.index, int) and self.target.of == "probability"
        if labels is None and not is_class:
            return []
        if labels is None:
            with looking(self.target.model), torch.no_grad():
                return self.target.answers().argmax(dim=1).tolist()
        number = int(self.target.edge_index.max()) + 1
        if labels.ndim != 1 or len(labels) < number or labels.is_floating_point():
            raise ValueError(
                f"labels: expected a class for each of at least {number} nodes, got "
                f"{list(labels.shape)}, {labels.dtype}"
            )
        return labels.tolist()

    def arrays(self) -> dict[str, Tensor]:
        """Return the values, the edges, and which of them can reach the node."""
        edge_index, candidates = self.target.edge_index, self.target.candidates
        return {"edges": self.values, "edge_index": edge_index, "candidates": candidates}

    def draw(
        self,
        seen: Explanation,
        *,
        labels: Annotated[Tensor, "nodes", int] | None = None,
        class_names: Sequence[str] = (),
        fidelity: EdgeFidelity | None = None,
        most: int = MOST_RANKED,
    ) -> Figure:
        """Draw the node, marked by a ring, and the edges with the largest absolute values.

        An edge is as wide as its number over the largest, as the scale shows; other edges between
        the same nodes are grey. The fidelity over k, with that of random edges, is drawn beside.

        Args:
            labels: classes that colour the nodes, −1 if not known; None: the predicted classes.
            class_names: names of the classes; empty: their numbers.
            fidelity: `seen.fidelity()`, if it was computed already; None: compute it.
            most: number of edges that are drawn as wide as their value.

        Raises:
            ValueError: labels that are not one class for each node; `most` below 1.
        """
        at_least(1, most=most)
        asked = self.target
        ego = ego_graph(self.values, asked.edge_index, asked.candidates, asked.index, most)
        if fidelity is None and int(asked.candidates.sum()) > 1:
            fidelity = self.trust(seen)
        figure = empty_figure(7.5 if fidelity is None else 10.5, 6.4)
        if fidelity is None:
            graph = figure.subplots()
        else:
            panels = figure.subplot_mosaic("gp;gm", width_ratios=[2.2, 1])
            graph = panels["g"]
            draw_fidelity([panels["p"], panels["m"]], fidelity, str(fidelity.target))
            sentence = in_picture(textwrap.fill(str(fidelity), 150))
            figure.supxlabel(sentence, x=0.01, ha="left", fontsize=9)
        title = in_picture(self.headline(seen, class_names))
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        draw_graph(
            graph,
            ego,
            self.classes(labels),
            class_names,
            method=f"{seen.method} of an edge",
            classes_are="class, as predicted" if labels is None else "class",
        )
        return figure

    def headline(self, seen: Explanation, class_names: Sequence[str] = ()) -> str:
        """Return the question and the model's answer in one line."""

        def name(one: int) -> str:
            return class_names[one] if one < len(class_names) else str(one)

        target, predicted, nodes = int(seen.target), int(seen.predicted), self.target.nodes
        where = ("the graph", "node {}", "the pair {}, {}")[len(nodes)].format(*nodes)
        model = "predicted" if target == predicted else f"predicted {name(predicted)}"
        what = f"class {name(target)} ({model})"
        # several labels may all be true, so there is no predicted class to name
        if len(nodes) == 2 or self.target.of != "probability":
            what = name(target)
        return (
            f"{seen.method} of {where}: {what}, {seen.quantity.symbol} = "
            f"{float(seen.probability):.3f}"
        )

    def lines(self, seen: Explanation) -> list[str]:
        """Return the headline, the first edges, the share of added self-loops, and the notes."""
        lines = [self.headline(seen), *(f"  {line}" for line in repr(seen.top()).splitlines())]
        if self.share:
            lines.append(f"Self-loops that layers added took {float(self.share):.0%}.")
        return [*lines, *seen.notes]
