"""Data module of the data sets of many graphs in torch_geometric."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

from attnkit.lightning.errors import UserError
from attnkit.tasks.graphs.checks import SPLITS
from attnkit.tasks.graphs.pyg import PyGSet
from attnkit.tasks.graphs.whole.data import GraphsDataModule


class PyGGraphsData(GraphsDataModule):
    """The graphs of a class in `torch_geometric.datasets`, such as TUDataset or ZINC.

    Downloads go to `root`, or to the user's cache folder, as with `PyGData`, and a file that names
    anything but numbers and containers is refused. A class with an argument `split` that `options`
    does not set is read for train, val and test; the graphs of others are split by `seed`.

    Args:
        name: the name of the class.
        root: the folder of a class that reads or downloads files; None: a cache folder.
        options: further arguments of the class: texts, numbers, truth values or None.

    The other arguments are those of `GraphsDataModule`.

    Raises:
        ValueError: an unknown class, or arguments it does not take.
        UserError: in `prepare_data` or `setup`, if the data cannot be read, has one graph only, or
            its graphs are not as described by `GraphsDataModule`.
    """

    def __init__(
        self,
        name: str,
        root: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self.class_name = name
        self._set = PyGSet(name, root, options)

    def prepare_data(self) -> None:
        self._set.read()  # downloads the files if necessary

    def load(self) -> Iterable[Data]:
        if self._set.has_splits:
            parts = {name: list(self._set.read(split=name)) for name in SPLITS}
            numbers = torch.arange(sum(map(len, parts.values())))
            pieces = numbers.split([len(part) for part in parts.values()])
            self.given_splits = dict(zip(parts, pieces, strict=True))
            found = [graph for part in parts.values() for graph in part]
        else:
            found = list(self._set.read())
        if len(found) == 1:
            raise UserError(
                f"data: {self.class_name} holds one graph, expected many; level=node data=pyg "
                "learns its nodes"
            )
        return found
