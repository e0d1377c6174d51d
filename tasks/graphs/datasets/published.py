"""Published benchmark graphs, from their files: Planetoid's and the heterophilous ones."""

from hashlib import sha256
from pathlib import Path
from typing import Any, Literal
from warnings import catch_warnings

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.io.planetoid import read_planetoid_data

from attnkit.core.arguments import at_least, choice, existing
from attnkit.lightning.errors import UserError, first_line
from attnkit.tasks.graphs.base import SPLITS
from attnkit.tasks.graphs.data import GraphDataModule
from attnkit.tasks.graphs.datasets.edges import read_edges
from attnkit.tasks.graphs.datasets.nodes import read_features, read_labels
from attnkit.tasks.graphs.datasets.part import Part, refuse_stand_in
from attnkit.tasks.graphs.datasets.parts import Parts
from attnkit.tasks.graphs.datasets.pickles import check_pickle

PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")  # x is a part of allx
CORA = "aa20ed01dbb40a2ace87265c2f7bceb1429ff24adeb593d521cb10dd3646d72c"
"""SHA-256 of the SHA-256 digests of the published files of Cora."""


class PlanetoidData(GraphDataModule):
    """A citation graph with its public split.

    20 nodes per class are for training, 500 nodes for validation and 1,000 for the test.

    Reads the eight files `ind.<name>.*` in `root/<name>/raw`, `root/raw` or `root`, as
    torch_geometric downloads them, and never writes there. They are pickles, but nothing in them is
    run: a file that names anything but numbers, lists and sparse matrices is refused. Files of
    Cora that differ from the published ones are read all the same, with a warning that results on
    them are not comparable.

    The graph equals that of `torch_geometric.datasets.Planetoid`, except that `normalize_features`
    also divides rows with a sum below 1 (PubMed's), as GAT's authors do. Nodes that no file
    describes (CiteSeer's 15) have no features and class 0, as in PyG, and are in no split.

    Source: Yang et al., Revisiting Semi-Supervised Learning with Graph Embeddings, 2016.

    Args:
        root: the folder.
        name: Cora, CiteSeer or PubMed.

    The other arguments are those of `GraphDataModule`.

    Raises:
        ValueError: `root` is not a folder, or the name is unknown.
        UserError: in `setup`, if files are missing, refused or do not fit together.
    """

    targets = ("classes",)

    def __init__(
        self,
        root: str | Path,
        name: Literal["Cora", "CiteSeer", "PubMed"] = "Cora",
        *,
        normalize_features: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(normalize_features=normalize_features, **options)
        choice(("Cora", "CiteSeer", "PubMed"), name=name)
        self.root = existing("root", root, folder=True)
        self.graph_name: str = name

    def load(self) -> Data:
        folder, prefix = self._folder(), self.graph_name.lower()
        files = [folder / f"ind.{prefix}.{part}" for part in PARTS]
        for file in files:
            refuse_stand_in(file)
            if file.name != f"ind.{prefix}.test.index":
                check_pickle(file)
        digests = "".join(sha256(file.read_bytes()).hexdigest() for file in files)
        if prefix == "cora" and sha256(digests.encode()).hexdigest() != CORA:
            rank_zero_warn(
                f"{folder}: not the published files of Cora (SHA-256 differs); results are not "
                "comparable"
            )
        try:
            with catch_warnings():
                return read_planetoid_data(str(folder), prefix)
        except Exception as error:  # parts that do not fit together can raise anything
            why = first_line(error, named=True)
            raise UserError(f"{folder}: the files cannot be read together: {why}") from error

    def _folder(self) -> Path:
        prefix = f"ind.{self.graph_name.lower()}"
        for folder in (self.root / self.graph_name / "raw", self.root / "raw", self.root):
            missing = [
                name for part in PARTS if not (folder / (name := f"{prefix}.{part}")).is_file()
            ]
            if not missing:
                return folder
            if len(missing) < len(PARTS):
                raise UserError(f"data.root: {folder} has no {', '.join(missing)}")
        raise UserError(
            f"data.root: no {prefix}.* in {self.root}, its raw/ or its {self.graph_name}/raw/; "
            "they are in the folder data of github.com/kimiyoung/planetoid"
        )


class HeterophilousData(GraphDataModule):
    """A graph in the format of the published heterophilous graphs, with fixed splits.

    Reads `<name>.npz` (a `-` in the name may be `_`) in `root`, `root/raw` or `root/<name>/raw`,
    without unpickling anything, and never writes there. The file holds `node_features`,
    `node_labels`, `edges` [edges, 2], and `train_masks`, `val_masks` and `test_masks` [splits,
    nodes]. The published files have 10 splits, of 50 / 25 / 25 % of the nodes. Each edge is stored
    once and made undirected, as by the authors, unless the name contains "directed". minesweeper,
    tolokers and questions are binary and unbalanced: `NodeClassification` also gives their ROC-AUC,
    which papers publish.

    Source: Platonov et al., A Critical Look at the Evaluation of GNNs under Heterophily, 2023.

    Args:
        root: the folder.
        name: the file: roman-empire, amazon-ratings, minesweeper, tolokers, questions, …
        num_splits: the expected number of splits; None: any number.

    The other arguments are those of `GraphDataModule`.

    Raises:
        ValueError: `root` is not a folder.
        UserError: in `setup`, if the file is missing or differs from the published form.
    """

    targets = ("classes",)

    def __init__(
        self,
        root: str | Path,
        name: str = "minesweeper",
        *,
        num_splits: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        at_least(1, num_splits=num_splits)
        self.expected_splits = num_splits
        self.root = existing("root", root, folder=True)
        self.graph_name = name

    def load(self) -> Data:
        parts = Parts(self._file())
        x = read_features(parts.expect("node_features"))
        edges = parts.expect("edges")
        if edges.array().shape[1:] != (2,):
            raise UserError(f"{edges.where}: expected [edges, 2], got {list(edges.array().shape)}")
        read = read_edges(edges, len(x), undirected="directed" not in self.graph_name)
        if self.predicts:
            return Data(x=x.float(), **read)
        y, _ = read_labels(parts.expect("node_labels"), len(x), ())
        masks = {f"{split}_mask": _masks(parts.expect(f"{split}_masks")) for split in SPLITS}
        found = masks["train_mask"].shape[1]
        if self.expected_splits not in (None, found):
            raise UserError(
                f"{parts.root}: expected data.num_splits={self.expected_splits} splits, got {found}"
            )
        return Data(x=x.float(), y=y, **read, **masks)

    def _file(self) -> Path:
        names = dict.fromkeys([self.graph_name, self.graph_name.replace("-", "_")])
        folders = [self.root, self.root / "raw", *(self.root / name / "raw" for name in names)]
        for folder in folders:
            for name in names:
                if (path := folder / f"{name}.npz").is_file():
                    return path
        raise UserError(
            f"data.root: no {self.graph_name}.npz in {self.root}; it is in the folder data of "
            "github.com/yandex-research/heterophilous-graphs"
        )


def _masks(part: Part) -> Tensor:
    """Return masks, bool [nodes, splits], from a part [splits, nodes]."""
    masks = part.array()
    if masks.ndim != 2 or not np.isin(masks, (0, 1)).all():
        raise UserError(
            f"{part.where}: expected masks of 0 and 1, [splits, nodes], "
            f"got {masks.dtype} {list(masks.shape)}"
        )
    return torch.from_numpy(masks.astype(bool)).t()
