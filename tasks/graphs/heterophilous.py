"""Reads the heterophilous graphs of Platonov et al. from their npz files."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from attnkit.core.arguments import at_least, existing
from attnkit.lightning.errors import UserError
from attnkit.tasks.graphs.checks import SPLITS
from attnkit.tasks.graphs.data import GraphDataModule
from attnkit.tasks.graphs.files.arrays import Parts
from attnkit.tasks.graphs.files.edges import read_edges
from attnkit.tasks.graphs.files.nodes import read_features, read_labels
from attnkit.tasks.graphs.files.part import Part


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
