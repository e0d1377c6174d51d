"""The heterophilous graphs of Platonov et al., from their npz files."""

from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from attnkit.lightning.arguments import at_least, existing
from attnkit.lightning.errors import UserError, first_line
from attnkit.tasks.node_classification.data import GraphDataModule

ARRAYS = ("node_features", "node_labels", "edges", "train_masks", "val_masks", "test_masks")


class HeterophilousData(GraphDataModule):
    """A heterophilous graph, with 10 fixed splits of 50 / 25 / 25 % of the nodes.

    Reads `<name>.npz` (a `-` in the name may be `_`) in `root`, `root/raw` or `root/<name>/raw`,
    without unpickling anything, and never writes there. The edges are stored once and made
    undirected. minesweeper, tolokers and questions are binary and unbalanced: `NodeClassification`
    also gives their ROC-AUC, which papers publish.

    Source: Platonov et al., A Critical Look at the Evaluation of GNNs under Heterophily, 2023.

    Args:
        root: the folder.
        name: which graph.
        split: 0 to 9.
        num_splits: how many the file has, so that `splits=all` knows it before reading.

    The other arguments are those of `GraphDataModule`.

    Raises:
        ValueError: `root` is not a folder.
        UserError: in `setup`, if the file is missing or differs from the published form.
    """

    def __init__(
        self,
        root: str | Path,
        name: Literal[
            "roman-empire", "amazon-ratings", "minesweeper", "tolokers", "questions"
        ] = "minesweeper",
        *,
        split: int = 0,
        num_splits: int = 10,
        **options: Any,
    ) -> None:
        super().__init__(split=split, **options)
        at_least(1, num_splits=num_splits)
        self.expected_splits = num_splits
        self.root = existing("root", root, folder=True)
        self.graph_name = name

    def load(self) -> Data:
        path = self._file()
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: torch.from_numpy(file[name]) for name in ARRAYS}
        except (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile) as error:
            reason = first_line(error).strip("\"'")
            raise UserError(f"{path} does not hold a heterophilous graph: {reason}") from error
        features, labels, edges = (arrays[name] for name in ARRAYS[:3])
        if arrays["train_masks"].shape[0] != self.expected_splits:
            raise UserError(
                f"{path}: expected data.num_splits={self.expected_splits} splits, "
                f"got {arrays['train_masks'].shape[0]}"
            )
        if edges.ndim != 2 or edges.shape[1] != 2:
            raise UserError(f"{path}: expected edges [edges, 2], got {list(edges.shape)}")
        return Data(
            x=features.float(),
            y=labels.long(),
            edge_index=to_undirected(edges.long().t().contiguous(), num_nodes=len(features)),
            **{name.removesuffix("s"): arrays[name].t() for name in ARRAYS[3:]},
        )

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
