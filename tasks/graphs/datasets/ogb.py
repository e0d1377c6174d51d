"""Reads graphs of the Open Graph Benchmark from their published folders."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import scatter

from attnkit.core.arguments import existing
from attnkit.lightning.errors import UserError
from attnkit.tasks.graphs.base import SPLITS
from attnkit.tasks.graphs.data import GraphDataModule
from attnkit.tasks.graphs.datasets.edges import read_edges
from attnkit.tasks.graphs.datasets.nodes import read_features, read_labels, read_mask
from attnkit.tasks.graphs.datasets.part import Part, refuse_stand_in
from attnkit.tasks.graphs.datasets.parts import Parts, part_of
from attnkit.tasks.graphs.datasets.pickles import KNOWN, Array
from attnkit.tasks.graphs.negative_pairs import HeldOut

_SHARED = ("edge", "edge_neg")
_OWN = ("source_node", "target_node", "target_node_neg")
SPLIT_FILES = {"train": "train", "val": "valid", "test": "test"}


class OGBFilesData(GraphDataModule):
    """A graph of OGB for node property prediction, such as ogbn-arxiv.

    ogbn-proteins, whose nodes have 112 labels each, needs `target="labels"`.

    Reads the unpacked folder as published, without the package `ogb` and without a download:
    `raw/edge.csv.gz`, `node-feat.csv.gz`, `node-label.csv.gz`, `num-node-list.csv.gz` and
    `num-edge-list.csv.gz`, or `raw/data.npz` and `node-label.npz`; `split/<name>/train.csv.gz`,
    `valid.csv.gz` and `test.csv.gz`; the names of classes in `mapping/`; and features of edges in
    `raw/edge-feat.csv.gz`. If nodes have no features, as in ogbn-proteins, the features of a node
    are the mean of those of its incoming edges, as in OGB's own examples. Text is read line by
    line; features are in memory. Nothing is written there.

    With `links` it may be a data set of links, such as ogbl-collab: `split/<name>/valid.pt` and
    `test.pt` have the held-out edges and the pairs among which each edge is ranked (`read_ogb`).
    `raw` has the edges to train on, so that `train.pt` is not read. If there are no features at
    all, as in ogbl-ddi, the features of a node are a one-hot vector of its number.

    Edges are as in the files. OGB itself adds the reverse of those of ogbn-products,
    ogbn-proteins, ogbl-collab, ogbl-ddi and ogbl-ppa (`undirected`); those of ogbn-arxiv and
    ogbl-citation2 lead from the citing paper.

    Source: Hu et al., Open Graph Benchmark, 2020.

    Args:
        root: the folder that holds `raw` and `split`, such as ogbn_arxiv.
        split_name: the folder in `split`; None: the only one.
        undirected: add the reverse of each edge, and merge repeated edges.

    The other arguments are those of `GraphDataModule`.

    Raises:
        ValueError: `root` is not a folder.
        UserError: in `setup`, if a file is missing, ends early or is malformed.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        split_name: str | None = None,
        undirected: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.root = existing("root", root, folder=True)
        self.split_name = split_name
        self.undirected = undirected

    def load(self) -> Data:
        raw = self.root / "raw"
        if not raw.is_dir():
            raise UserError(f"data.root: {self.root} has no folder raw, as published graphs have")
        binary = (raw / "data.npz").is_file()
        nodes, edges, carried, x = self._binary(raw) if binary else self._text(raw)
        found = read_edges(edges, nodes, carried={"edge_attr": carried}, undirected=self.undirected)
        if x is None and carried:
            x = scatter(found["edge_attr"], found["edge_index"][1], 0, nodes, "mean")
        elif x is None:  # the first layer then learns a vector of each node
            places = torch.arange(nodes).repeat(2, 1)
            x = torch.sparse_coo_tensor(places, torch.ones(nodes), check_invariants=True)
        if self.links and any((self.root / "split").glob("*/valid.pt")):
            folder = self._split_folder()
            self.link_splits = {s: read_ogb(folder / f"{SPLIT_FILES[s]}.pt") for s in SPLITS[1:]}
        if self.predicts:
            return Data(x=x, **found)
        label = _file(raw, f"node-label.{'npz' if binary else 'csv.gz'}", rows=nodes)
        if self.target == "classes":
            y, self.class_names = read_labels(label, nodes, self._class_names())
        else:
            y = torch.from_numpy(label.array(np.float32))
            label.check_rows(y.numpy())
            self._labels = label
        folder = self._split_folder()
        found |= {
            f"{split}_mask": read_mask(_file(folder, f"{name}.csv.gz"), nodes)
            for split, name in SPLIT_FILES.items()
        }
        return Data(x=x, y=y, **found)

    def _text(self, raw: Path) -> tuple[int, Part, Part | None, Tensor | None]:
        counts = {
            kind: _file(raw, f"num-{kind}-list.csv.gz").array(np.int64, 1)
            for kind in ("node", "edge")
        }
        for kind, count in counts.items():
            if count.shape != (1, 1):
                path = raw / f"num-{kind}-list.csv.gz"
                raise UserError(f"{path}: expected the size of one graph, got {len(count)}")
        nodes, num_edges = (int(counts[kind][0, 0]) for kind in ("node", "edge"))
        edges = _file(raw, "edge.csv.gz", rows=num_edges)
        has = {
            kind: any((raw / f"{kind}-feat.csv{gz}").is_file() for gz in (".gz", ""))
            for kind in ("node", "edge")
        }
        carried = _file(raw, "edge-feat.csv.gz", rows=num_edges) if has["edge"] else None
        if not has["node"] and (carried or self.links):
            return nodes, edges, carried, None
        features = self._features = _file(raw, "node-feat.csv.gz", rows=nodes)
        return nodes, edges, carried, read_features(features)

    def _binary(self, raw: Path) -> tuple[int, Part, Part | None, Tensor | None]:
        parts = Parts(raw / "data.npz")
        self._features = parts.expect("node_feat")
        x = read_features(self._features)
        return len(x), parts.expect("edge_index"), parts.find("edge_feat"), x

    def _split_folder(self) -> Path:
        folder = self.root / "split"
        found = sorted(path.name for path in folder.glob("*") if path.is_dir())
        if self.split_name is None and len(found) == 1:
            return folder / found[0]
        if self.split_name not in found:
            raise UserError(
                f"data.split_name: expected a folder of {folder}, which has "
                f"{', '.join(found) or 'none'}, got {self.split_name}"
            )
        return folder / self.split_name

    def _class_names(self) -> list[str]:
        """Read the names of `mapping/labelidx2….csv.gz`, one number and name per line."""
        found = sorted((self.root / "mapping").glob("labelidx2*.csv.gz"))
        if len(found) != 1:
            return []
        rows = [",".join(fields[1:]) for fields, _ in part_of(found[0]).fields()][1:]
        return rows if len(set(rows)) == len(rows) else []


def _file(folder: Path, name: str, rows: int | None = None) -> Part:
    """Return the part of a file, compressed or not."""
    for path in (folder / name, folder / name.removesuffix(".gz")):
        if path.is_file():
            return part_of(path, rows=rows)
    raise UserError(f"data.root: {folder} has no {name}")


def read_ogb(path: Path) -> HeldOut:
    """Read `valid.pt` or `test.pt` of a link set of OGB.

    The file holds a dictionary of arrays: `edge` [edges, 2] and `edge_neg` [absent, 2], among which
    each edge is ranked; or `source_node` [edges], `target_node` [edges] and `target_node_neg`
    [edges, k], targets that a source is not joined to. Other arrays, such as `weight` and `year`,
    are not read.

    Raises:
        UserError: the file does not hold these arrays.
    """
    found = _load_saved(path)
    known: dict[str, Any] = found if isinstance(found, dict) else {}
    given = {
        name: one.long()
        for name in (*_SHARED, *_OWN)
        if isinstance(one := known.get(name), Tensor) and not one.is_floating_point()
    }
    if given.keys() == set(_SHARED):
        return HeldOut(given["edge"].T, given["edge_neg"].T, str(path))
    if given.keys() == set(_OWN):
        source, target, others = (given[name] for name in _OWN)
        if source.shape == target.shape == others.shape[:1] and others.ndim == 2:
            absent = torch.stack([source[:, None].expand_as(others), others])
            return HeldOut(torch.stack([source, target]), absent, str(path))
    held = {name: list(getattr(one, "shape", ())) for name, one in known.items()}
    raise UserError(
        f"{path}: expected arrays {' and '.join(_SHARED)}, or {', '.join(_OWN)}, got "
        f"{', '.join(f'{name} {shape}' for name, shape in held.items()) or type(found).__name__}"
    )


def _load_saved(path: Path) -> Any:
    """Load tensors, arrays of numbers (as tensors) and dictionaries that `torch.save` wrote.

    Raises:
        UserError: the file contains any other name, which the message gives, or is broken.
    """
    refuse_stand_in(path)
    known: list[Any] = [(found, name) for name, found in KNOWN.items() if name.startswith("numpy")]
    try:
        with torch.serialization.safe_globals(known):
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # a broken pickle can raise anything
        if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            why = f"it names {named[1]}, which is refused"
        else:  # torch's message without its advice to run the code in the file
            message = str(error).rpartition("WeightsUnpickler error:")[2].strip()
            why = message.partition("\n")[0].partition(". ")[0] or "it ends early"
        raise UserError(f"{path} is not a file of tensors and arrays: {why}") from error
    if not isinstance(saved, dict):
        return saved
    return {
        name: torch.from_numpy(one.array.copy()) if isinstance(one, Array) else one
        for name, one in saved.items()
    }
