"""What `attnkit.explain` returns for a graph."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from attnkit.core.arguments import at_least
from attnkit.interpret.graphs.ego import MOST_RANKED, ego_graph
from attnkit.interpret.graphs.fidelity import EdgeFidelity, fidelity_of
from attnkit.interpret.graphs.picture import draw_graph
from attnkit.interpret.graphs.question import GraphQuestion
from attnkit.interpret.graphs.table import EdgeRow, EdgeTable, steps_to
from attnkit.interpret.methods.question import looking
from attnkit.interpret.picture import save

MOST_SHOWN = 5


@dataclass(eq=False, repr=False)
class GraphExplanation:
    """Which edges a graph model looks along, or its answer depends on, for a node or a graph.

    method: its name.
    edges: a number for each edge, in the caller's order.
    edge_index: the edges.
    candidates: which of them can reach the node at all; `edges` is 0 elsewhere.
    share: what the self-loops that layers added took of the sum of sizes; 0 where there are none.
    index: the node; None: the graph.
    target: the class that is explained; for a method that knows of none, the predicted class.
    predicted, logit, probability: the model's own class, and logit and softmax of `target`,
        or the sigmoid of a single logit.
    notes: what was assumed on the way, a sentence each.
    is_signed: whether negative numbers speak against the class.
    """

    method: str
    edges: Annotated[Tensor, "edges"]
    edge_index: Annotated[Tensor, "2 edges", int]
    candidates: Annotated[Tensor, "edges", bool]
    share: float
    index: int | None
    target: int
    predicted: int
    logit: float
    probability: float
    question: GraphQuestion
    notes: list[str] = field(default_factory=list)
    is_signed: bool = False

    def fidelity(
        self, ks: Sequence[int] | None = None, num_draws: int = 20, seed: int = 0
    ) -> EdgeFidelity:
        """What the model predicts without the edges that rank first, and with these alone.

        Args and errors as of `attnkit.edge_fidelity`.
        """
        with looking(self.question.model), torch.no_grad():
            return fidelity_of(self.question, self.edges, ks, num_draws, seed)

    def trust(self) -> EdgeFidelity:
        """How far to trust it: `fidelity()`, of which `str()` is sentences."""
        return self.fidelity()

    def top(self, k: int = MOST_SHOWN) -> EdgeTable:
        """The k edges that rank first, of those that can reach the node: a list that is printed as
        a table.

        Raises:
            ValueError: k below 1.
        """
        at_least(1, k=k)
        places = self.candidates.nonzero()[:, 0]
        places = places[self.edges[places].argsort(descending=True, stable=True)][:k]
        sizes = float(self.edges.abs().sum()) / (1 - self.share) if self.share < 1 else 0.0
        steps = None
        if self.index is not None:
            number = max(int(self.edge_index.max()), self.index) + 1
            steps = steps_to(self.index, self.edge_index[:, self.candidates], number)
        return EdgeTable(
            EdgeRow(
                source,
                target,
                score,
                abs(score) / sizes if sizes else 0.0,
                None if steps is None else int(steps[source]),
            )
            for (source, target), score in zip(
                self.edge_index[:, places].T.tolist(), self.edges[places].tolist(), strict=True
            )
        )

    def predictions(self) -> Annotated[Tensor, "nodes", int]:
        """The class that the model predicts for each node; empty where it answers for a graph."""
        if self.index is None:
            return torch.empty(0, dtype=torch.long)
        with looking(self.question.model), torch.no_grad():
            return self.question.answers().argmax(dim=1).cpu()

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        labels: Annotated[Tensor, "nodes", int] | None = None,
        class_names: Sequence[str] = (),
        fidelity: EdgeFidelity | None = None,
        most: int = MOST_RANKED,
    ) -> Path:
        """Write a picture (.png, .pdf, .svg) or the arrays (.npz, .pt); returns the path.

        The picture is of the node, which a ring marks, and of the edges that rank first by size, as
        wide as their number over the largest, which the scale says; other edges between the same
        nodes are grey. Beside it is fidelity over k, with random edges.

        Args:
            labels: the nodes' classes, which colour them; −1 where one is not known. None: those
                that the model predicts.
            class_names: None of them: their numbers.
            fidelity: `fidelity()`, where it is there already; it is computed otherwise.
            most: how many edges are drawn as wide as their value.

        Raises:
            ValueError: another ending; labels not one a node; `most` below 1.
        """
        path = Path(path)
        arrays = {name: getattr(self, name).cpu() for name in ("edges", "edge_index", "candidates")}
        if path.suffix == ".npz":
            np.savez(path, **{name: tensor.numpy() for name, tensor in arrays.items()})
        elif path.suffix == ".pt":
            torch.save(arrays, path)
        elif path.suffix in (".png", ".pdf", ".svg"):
            at_least(1, most=most)
            ego = ego_graph(self.edges, self.edge_index, self.candidates, self.index, most)
            if fidelity is None and int(self.candidates.sum()) > 1:
                fidelity = self.fidelity()
            figure = draw_graph(
                ego,
                self.index,
                self.classes(labels),
                class_names,
                title=self.headline(class_names),
                method=f"{self.method} of an edge",
                classes_are="class, as predicted" if labels is None else "class",
                fidelity=fidelity,
            )
            save(path, figure)
        else:
            raise ValueError(
                f"path: expected .png, .pdf, .svg, .npz or .pt, got {path.suffix or path.name!r}"
            )
        return path

    def classes(self, labels: Tensor | None = None) -> list[int]:
        """What colours the nodes: labels, or what the model predicts; empty: nothing.

        Raises:
            ValueError: labels not one a node.
        """
        if labels is None:
            return self.predictions().tolist()
        number = int(self.edge_index.max()) + 1
        if labels.ndim != 1 or len(labels) < number or labels.is_floating_point():
            raise ValueError(
                f"labels: expected a class for each of at least {number} nodes, got "
                f"{list(labels.shape)}, {labels.dtype}"
            )
        return labels.tolist()

    def headline(self, class_names: Sequence[str] = ()) -> str:
        """What was asked and what the model said, in a line."""

        def name(one: int) -> str:
            return class_names[one] if one < len(class_names) else str(one)

        where = "the graph" if self.index is None else f"node {self.index}"
        model = (
            "predicted" if self.target == self.predicted else f"predicted {name(self.predicted)}"
        )
        return (
            f"{self.method} of {where}: class {name(self.target)} ({model}), "
            f"p = {self.probability:.3f}"
        )

    def __repr__(self) -> str:
        lines = [self.headline(), *(f"  {line}" for line in repr(self.top()).splitlines())]
        if self.share:
            lines.append(f"Self-loops that layers added took {self.share:.0%}.")
        return "\n".join([*lines, *self.notes])
