"""Data module of many graphs in the user's own files."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch_geometric.data import Data

from attnkit.lightning.errors import UserError
from attnkit.tasks.graphs.checks import check_finite, checked_values
from attnkit.tasks.graphs.files.arrays import Parts
from attnkit.tasks.graphs.files.nodes import read_labels, read_mask, read_names, read_values
from attnkit.tasks.graphs.files.own import parts_of_splits, read_all_edges, read_nodes
from attnkit.tasks.graphs.files.part import Part, are_whole, numbers_of
from attnkit.tasks.graphs.whole.data import GraphsDataModule


class GraphsFilesData(GraphsDataModule):
    """Many graphs in your own files, one after the other.

    The parts are those of `GraphFilesData`, in which features, edges and their attributes are those
    of all graphs, and

    | part | what it is | other names |
    |---|---|---|
    | `graphs` | the graph of each node: 0 for those of the first, then 1, …; or a name | `batch` |
    | `labels` | a row for each graph, or with `level="node"` for each node: see below | `y` |
    | `train`, `val`, `test` | graphs by number or name, or masks [graphs]; optional | as there |
    | `classes` | the names of the classes, labels or numbers; optional | |

    With `target="classes"` a label is a number from 0 on or a name; −1, nan and empty cells are
    unknown. With "labels" a row has several values 0 or 1 (or True and False), with "numbers"
    several numbers; nan and empty cells are unknown. The header of such a table names them.

    Nodes are numbered through all graphs, and an edge joins two nodes of one graph. Without train,
    val and test the graphs are split by `seed`. In a prediction, labels and splits are not read.
    Names of graphs are a column of predictions.csv. `GraphFilesData` describes the format of the
    files; all of them are read into memory.

    Args:
        root: the folder or .npz.
        undirected: add the reverse of each edge, and merge repeated edges.

    The other arguments are those of `GraphsDataModule`.

    Raises:
        ValueError: `root` is not there.
        UserError: in `setup`, if a part is missing or malformed; the message names file and line.
    """

    def __init__(self, root: str | Path, *, undirected: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.root = Path(root).expanduser().absolute()
        if not self.root.exists():
            raise ValueError(f"root: no such folder or .npz: {root}")
        self.undirected = undirected
        self._labels: Part | None = None

    def load(self) -> Iterable[Data]:
        parts = Parts(self.root)
        classes, part = parts.find("classes"), parts.expect("graphs", "batch")
        labels = parts.find("labels", "y") if self.predicts else parts.expect("labels", "y")
        features, x, names = read_nodes(parts, part)
        check_finite(x, features.node_place)
        owners, self.graph_names = read_graphs(part, len(x))
        edges = read_all_edges(parts, len(x), names, undirected=self.undirected, graphs=owners)
        splits, count = parts_of_splits(parts, self.predicts), int(owners[-1]) + 1
        found: dict[str, list[Tensor]] = {"x": _pieces(x, owners, count)}
        if labels and not self.predicts:
            self._labels = labels
            known = read_names(classes) if classes else []
            found["y"] = self._read_targets(labels, known, owners)
            self.given_splits = self._read_splits(splits, count)
        owner_of_edge = owners[edges["edge_index"][0].numpy()]
        order = torch.from_numpy(owner_of_edge.argsort(kind="stable"))
        first_nodes = np.searchsorted(owners, np.arange(count))
        edges["edge_index"] = edges["edge_index"] - torch.from_numpy(first_nodes[owner_of_edge])
        for name, values in edges.items():
            values = (values.T if name == "edge_index" else values)[order]
            found[name] = _pieces(values, owner_of_edge, count)
        found["edge_index"] = [piece.T for piece in found["edge_index"]]
        return [
            Data(**dict(zip(found, graph, strict=True)))
            for graph in zip(*found.values(), strict=True)
        ]

    def place_of(self, graph: int) -> str:
        if self._labels is None or self.predicts or self.level == "node":
            return f"{self.root}: graph {graph}"
        return f"{self._labels.place_of(graph)}: graph {graph}"

    def _read_targets(self, part: Part, names: list[str], owners: np.ndarray) -> list[Tensor]:
        """Return y of each graph, and set `class_names`."""
        if self.level == "graph":
            owners, part.item = np.arange(int(owners[-1]) + 1), "graph"
        rows, count = len(owners), int(owners[-1]) + 1
        if self.target == "classes":
            y, self.class_names = read_labels(part, rows, names)
        else:
            items = (self.graph_names if self.level == "graph" else None) or ()
            y, self.class_names = read_values(part, rows, self.target, names, items)
            checked_values(y, self.target, part.place_of)
        return _pieces(y, owners, count)

    def _read_splits(self, parts: dict[str, Part], count: int) -> dict[str, Tensor] | None:
        names = {name: number for number, name in enumerate(self.graph_names or ())}
        splits = {}
        for split, part in parts.items():
            part.item = "graph"
            mask = read_mask(part, count, names or None)
            if mask.numel() != count:
                raise UserError(f"{part.where}: expected a mask [{count}], got {list(mask.shape)}")
            splits[split] = mask.flatten().nonzero().flatten()
        if not splits:
            rank_zero_info(f"{self.root} has no train, val and test: split by seed={self.seed}")
        return splits or None


def read_graphs(part: Part, count: int) -> tuple[np.ndarray, list[str] | None]:
    """Return the graph of each of `count` nodes, int64 [nodes], and the names of graphs, or None.

    Raises:
        UserError: the nodes of a graph are not together, or the numbers are not 0, 1, 2, ….
    """
    words = part.words(count)
    found = numbers_of(words)
    if found.ndim != 1 or len(found) != count:
        raise UserError(
            f"{part.where}: expected {count} rows, the graph of each node, got {list(found.shape)}"
        )
    if found.dtype.kind == "f" and are_whole(found).all():
        found = found.astype(np.int64)
    if found.dtype.kind not in "iuU":
        raise UserError(f"{part.where}: expected whole numbers or names, got {found.dtype}")
    begins = np.concatenate([[True], found[1:] != found[:-1]])
    graphs = begins.cumsum() - 1
    if found.dtype.kind != "U":
        wrong = found != graphs
        if wrong.any():
            node = int(wrong.argmax())
            expected = f"{graphs[node - 1]} or {graphs[node]}" if node else "0"
            raise UserError(
                f"{part.node_place(node)}: expected graph {expected}, got {found[node]}: graphs "
                "are numbered 0, 1, 2, … in the order of their nodes, and each has nodes"
            )
        return graphs, None
    names: dict[str, None] = {}
    for node in begins.nonzero()[0].tolist():
        name = str(found[node])
        if name in names or not name:
            what = f"the nodes of graph {name!r} are not together" if name else "names no graph"
            raise UserError(f"{part.node_place(node)}: {what}; sort the nodes by their graph")
        names[name] = None
    return graphs, list(names)


def _pieces(values: Tensor, owners: np.ndarray, count: int) -> list[Tensor]:
    """Return the rows of each graph; `values` are in the order of the graphs."""
    return list(values.split(np.bincount(owners, minlength=count).tolist()))
