"""The unit of explanations of graph models: the edges along which messages reach a node."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from attnkit.core.arguments import at_least
from attnkit.interpret.graphs.fidelity import EdgeFidelity, fidelity_of
from attnkit.interpret.graphs.picture import (
    MOST_RANKED,
    draw_fidelity,
    draw_graph,
    ego_graph,
    empty_figure,
)
from attnkit.interpret.graphs.question import GraphQuestion, steps_to
from attnkit.interpret.methods.question import looking
from attnkit.interpret.text_table import text_table
from attnkit.interpret.units.unit import Unit
from attnkit.lightning.console import in_picture

if TYPE_CHECKING:
    from attnkit.interpret.explanation import Explanation


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


class Edges(Unit):
    """The edges of a graph, in the caller's order.

    Attributes:
        values: [edges]; 0 if an edge cannot reach the node.
        share: share of the self-loops that layers added.
    """

    name = "edge"
    target: GraphQuestion

    def __init__(self, target: GraphQuestion, found: Tensor) -> None:
        super().__init__(target, found[:-1])
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
        assert self.share is not None
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
