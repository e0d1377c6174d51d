"""Data modules of one graph or many in the user's own files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch_geometric.data import Data

from attnkit.core.arguments import held_out
from attnkit.lightning.errors import UserError
from attnkit.tasks.graphs.base import SPLITS, check_finite, checked_values
from attnkit.tasks.graphs.data import GraphDataModule
from attnkit.tasks.graphs.datasets.edges import read_edges
from attnkit.tasks.graphs.datasets.nodes import (
    read_features,
    read_mask,
    read_names,
    read_targets,
)
from attnkit.tasks.graphs.datasets.part import Part, are_whole, numbers_of
from attnkit.tasks.graphs.datasets.parts import Parts
from attnkit.tasks.graphs.many_data import GraphsDataModule
from attnkit.tasks.graphs.negative_pairs import HeldOut
from attnkit.tasks.graphs.splits import random_masks

CARRIED = {
    "edge_attr": ("edge_attr", "edge_features"),
    "edge_weight": ("edge_weight", "edge_weights"),
}
MASKS = {
    "train": ("train", "train_mask"),
    "val": ("val", "valid", "val_mask"),
    "test": ("test", "test_mask"),
}


class GraphFilesData(GraphDataModule):
    """A graph in your own files: one for each part in a folder, or an .npz with all arrays.

    | part | what it is | other names |
    |---|---|---|
    | `edges` | source and target of each edge, [edges, 2] or [2, edges] | `edge_index` |
    | `features` | numbers [nodes, channels] | `x` |
    | `labels` | the class of each node, a number from 0 on or a name; −1, nan: none | `y` |
    | `train`, `val`, `test` | numbers of nodes, or masks (see below); optional | `train_mask`, … |
    | `edge_attr` | numbers [edges, channels], the features of edges; optional | `edge_features` |
    | `edge_weight` | a number for each edge; optional | `edge_weights` |
    | `classes` | the name of each class, if labels are numbers, or of each column; optional | |
    | `nodes` | the name of each node, which edges and splits then use; optional | |
    | `val_edges`, `test_edges` | with `links`: edges that are held out and not in `edges`; one \
direction of each in an undirected graph; optional | |
    | `val_negatives`, `test_negatives` | pairs among which these edges are ranked; optional | |

    A part is `<name>.npy`, `.npz`, `.csv`, `.tsv`, `.txt`, the last three also with `.gz`, or
    `.parquet`, which needs pyarrow. Nodes are 0 to nodes − 1, the rows of `features`. A header of
    a table and a first column without a name, as pandas writes its index, are ignored; a first
    column of features with a name that counts the nodes may be an index or a feature, and is
    refused. An `.npy` of features is mapped: with a `batch_size` only the rows of a batch are read,
    after one pass over all that checks that they are finite; `normalize_features` and
    `sparse_features` read it into memory. Text is read line by line. Nothing is unpickled, and
    nothing is written.

    With `target` "labels" or "numbers", `labels` has a row for each node, of several labels (0, 1)
    or numbers; a header names them. Empty cells and nan are unknown and do not count.

    A mask is [nodes], or [nodes, splits], of truth values or of 0 and 1. An empty class means no
    label, as −1 and nan do.

    Repeated edges and self-loops are kept, and a warning counts them. Without train, val and test a
    random split is drawn by `seed`, with `val_fraction` and `test_fraction` of every class. In a
    prediction, labels and splits are not read.

    Args:
        root: the folder or .npz.
        undirected: add the reverse of each edge, and merge repeated edges.
        val_fraction, test_fraction: shares of a random split.

    The other arguments are those of `GraphDataModule`.

    Raises:
        ValueError: `root` is not there.
        UserError: in `setup`, if a part is missing or malformed; the message names file and line.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        undirected: bool = False,
        val_fraction: float = 0.2,
        test_fraction: float = 0.2,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        held_out(val_fraction=val_fraction, test_fraction=test_fraction)
        self.root = _there(root)
        self.undirected = undirected
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction

    def load(self) -> Data:
        parts = Parts(self.root)
        classes = parts.find("classes")
        labels = parts.find("labels", "y") if self.predicts else parts.expect("labels", "y")
        self._features, x, names = read_nodes(parts, labels)
        if names:
            self.node_names = list(names)
        edges = read_all_edges(parts, len(x), names, undirected=self.undirected)
        if self.links:
            self.link_splits = read_link_splits(parts, len(x), names)
        splits = parts_of_splits(parts, self.predicts)
        if labels is None or self.predicts:
            return Data(x=x, **edges)
        self._labels = labels
        known = read_names(classes) if classes else []
        y, self.class_names = read_targets(labels, len(x), self.target, known, names or ())
        masks = {f"{name}_mask": read_mask(part, len(x), names) for name, part in splits.items()}
        if not masks:
            rank_zero_info(
                f"{self.root} has no train, val and test: split by data.seed={self.seed}"
            )
            masks = random_masks(y, [self.val_fraction, self.test_fraction], self.seed)
        return Data(x=x, y=y, **edges, **masks)


def _there(root: str | Path) -> Path:
    path = Path(root).expanduser().absolute()
    if not path.exists():
        raise ValueError(f"root: no such folder or .npz: {root}")
    return path


def read_nodes(parts: Parts, beside: Part | None) -> tuple[Part, Tensor, dict[str, int] | None]:
    """Return the part `features`, its values [nodes, channels], and numbers of nodes by name.

    The latter are None if nodes have no names.

    Args:
        beside: another part with a row for each node, or None (see `read_features`).
    """
    part, nodes = parts.expect("features", "x"), parts.find("nodes")
    x = read_features(part, [other for other in (nodes, beside) if other])
    names = None
    if nodes:
        names = {name: number for number, name in enumerate(read_names(nodes, len(x)))}
    part.refuse_index(x.numpy(), "a feature", list(names or ()))
    return part, x, names


def read_all_edges(
    parts: Parts, count: int, names: Mapping[str, int] | None, **options: Any
) -> dict[str, Tensor]:
    """Return the edges between `count` nodes and their attributes, in the form of `read_edges`.

    `names` and `options` are arguments of `read_edges`.
    """
    carried = {name: parts.find(*others) for name, others in CARRIED.items()}
    part = parts.expect("edges", "edge_index")
    return read_edges(part, count, names, carried=carried, **options)


def read_link_splits(
    parts: Parts, count: int, names: Mapping[str, int] | None
) -> dict[str, HeldOut]:
    """Return the held-out links of val and test; nothing if the parts are not there.

    The edges are in the parts `val_edges` and `test_edges`; the pairs among which they are ranked
    in `val_negatives` and `test_negatives`, if these are there.

    Raises:
        UserError: some of the parts are there, but not the edges of both splits.
    """

    def pairs(part: Part | None) -> Any:
        return part and read_edges(part, count, names)["edge_index"]

    def held(split: str) -> HeldOut:
        edges, absent = parts.expect(f"{split}_edges"), parts.find(f"{split}_negatives")
        return HeldOut(pairs(edges), pairs(absent), edges.where)

    known = [f"{split}_{kind}" for split in SPLITS[1:] for kind in ("edges", "negatives")]
    if not any(map(parts.find, known)):
        return {}
    return {split: held(split) for split in SPLITS[1:]}


def parts_of_splits(parts: Parts, predicts: bool) -> dict[str, Part]:
    """Return the parts train, val and test, or nothing if none is there.

    They are the last parts that are looked for, so that a log line can name the files not used.

    Args:
        predicts: whether the parts will not be read, so that some may be missing.

    Raises:
        UserError: some of the parts are there, but not all.
    """
    found = {split: parts.find(*MASKS[split]) for split in SPLITS}
    given = {split: part for split, part in found.items() if part}
    if unused := parts.unused():
        rank_zero_info(f"{parts.root}: not used, as no part of a graph: {', '.join(unused)}")
    lacking = [split for split in SPLITS if split not in given]
    if given and lacking and not predicts:
        raise UserError(f"data.root: {parts.root} has no {' and no '.join(lacking)}")
    return given


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
        self.root = _there(root)
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
        items = (self.graph_names if self.level == "graph" else None) or ()
        y, self.class_names = read_targets(part, rows, self.target, names, items)
        if self.target != "classes":
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
