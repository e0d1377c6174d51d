"""What `attnkit.explain` returns for a graph."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from attnkit.sight.graphs.fidelity import EdgeFidelity, fidelity_of
from attnkit.sight.graphs.question import GraphQuestion
from attnkit.sight.methods.question import looking

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
    predicted, logit, probability: the model's own class, and logit and softmax of `target`.
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

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the arrays (.npz, .pt); returns the path.

        Raises:
            ValueError: another ending.
        """
        path = Path(path)
        arrays = {name: getattr(self, name).cpu() for name in ("edges", "edge_index", "candidates")}
        if path.suffix == ".npz":
            np.savez(path, **{name: tensor.numpy() for name, tensor in arrays.items()})
        elif path.suffix == ".pt":
            torch.save(arrays, path)
        else:
            raise ValueError(f"path: expected .npz or .pt, got {path.suffix or path.name!r}")
        return path

    def __repr__(self) -> str:
        where = "the graph" if self.index is None else f"node {self.index}"
        said = "predicted" if self.target == self.predicted else f"predicted {self.predicted}"
        lines = [
            f"{self.method} of {where}: class {self.target} ({said}), p = {self.probability:.3f}"
        ]
        order = self.edges.argsort(descending=True, stable=True)
        for edge in order[:MOST_SHOWN].tolist():
            source, target = self.edge_index[:, edge].tolist()
            lines.append(f"  {source} → {target}  {float(self.edges[edge]):.4g}")
        if self.share:
            lines.append(f"Self-loops that layers added took {self.share:.0%}.")
        return "\n".join([*lines, *self.notes])
