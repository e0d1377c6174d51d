"""Data modules of the data sets in torch_geometric, of one graph and of many."""

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch_geometric.data import Data, Dataset

from attnkit.core.arguments import held_out
from attnkit.core.names import nearest
from attnkit.core.operators.files import cache_folder
from attnkit.lightning.errors import UserError, first_line
from attnkit.tasks.graphs.base import SPLITS
from attnkit.tasks.graphs.data import GraphDataModule
from attnkit.tasks.graphs.datasets.pickles import only_data
from attnkit.tasks.graphs.many_data import GraphsDataModule
from attnkit.tasks.graphs.splits import random_masks

_PLAIN = (str, int, float, bool, type(None))


class PyGData(GraphDataModule):
    """The one graph of a class in `torch_geometric.datasets`, with its own splits or a random one.

    Downloads go to `root`, or to the user's cache folder; PyG also writes its processed files
    there. Some of its classes unpickle files; a file that names anything but numbers and containers
    is refused, as in `PlanetoidData`.

    A graph without one of the masks of train, val and test is split by `seed`, with `val_fraction`
    and `test_fraction` of every class, or of all nodes without classes. A log line reports it.

    Args:
        name: the name of the class, such as KarateClub.
        root: the folder of a class that reads or downloads files; None: a cache folder.
        options: further arguments of the class: texts, numbers, truth values or None.
        val_fraction: share of a random split for validation.
        test_fraction: share of a random split for the test.

    The other arguments are those of `GraphDataModule`.

    Raises:
        ValueError: an unknown class, or arguments it does not take.
        UserError: in `prepare_data` or `setup`, if the data cannot be read or holds several graphs.
    """

    def __init__(
        self,
        name: str,
        root: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        val_fraction: float = 0.2,
        test_fraction: float = 0.2,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        held_out(val_fraction=val_fraction, test_fraction=test_fraction)
        self.class_name = name
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self._set = PyGSet(name, root, options)

    def prepare_data(self) -> None:
        self._set.read()  # downloads the files if necessary

    def load(self) -> Data:
        dataset = self._set.read()
        if len(dataset) != 1:
            raise UserError(f"data: expected one graph, {self.class_name} holds {len(dataset)}")
        data = dataset[0]
        if not isinstance(data, Data):
            raise UserError(
                f"data: {self.class_name} holds a {type(data).__name__}, expected a Data"
            )
        if (
            any(data.get(f"{split}_mask") is None for split in SPLITS)
            and not self.predicts
            and data.get("y") is not None
            and (data.y.ndim == 1 or self.target != "classes")
        ):
            rank_zero_info(
                f"{self.class_name} does not have all masks of train, val and test: "
                f"split by data.seed={self.seed}"
            )
            fractions = [self.val_fraction, self.test_fraction]
            y = data.y if self.target == "classes" else data.y.float().view(len(data.y), -1)
            data.update(random_masks(y, fractions, self.seed))
        return data


class PyGSet:
    """A class in `torch_geometric.datasets` and its arguments, checked; see `PyGData`."""

    def __init__(
        self, name: str, root: str | Path | None, options: Mapping[str, Any] | None
    ) -> None:
        self.name = name
        self._class = _dataset(name)
        self._arguments = dict(options or {})
        self.parameters = [*inspect.signature(self._class).parameters]
        for key, value in self._arguments.items():
            if key not in self.parameters or key == "root":
                raise ValueError(f"options.{key}: {name} takes {', '.join(self.parameters)}")
            if not isinstance(value, _PLAIN):
                raise ValueError(
                    f"options.{key}: expected a text, number, truth value or null, got {value!r}"
                )
        if "root" in self.parameters:
            folder = cache_folder() / "pyg" / name if root is None else Path(root).expanduser()
            self._arguments["root"] = str(folder.absolute())
        elif root is not None:
            raise ValueError(f"root: {name} reads no files")

    @property
    def has_splits(self) -> bool:
        """Whether the class has an argument `split` that `options` does not set."""
        return "split" in self.parameters and "split" not in self._arguments

    def read(self, **more: Any) -> Dataset:
        """Return the data set; `more` are further arguments of the class.

        Raises:
            UserError: the data set cannot be read, or its files name code.
        """
        try:
            with only_data(self.name):
                return self._class(**self._arguments, **more)
        except UserError:
            raise
        except Exception as error:  # each class reads and downloads in its own way
            raise UserError(f"data: {self.name} cannot be read: {first_line(error)}") from error


def _dataset(name: str) -> type[Dataset]:
    from torch_geometric import datasets

    if name not in datasets.__all__:
        hint = nearest(name, datasets.__all__)
        raise ValueError(f"name: torch_geometric.datasets has no {name!r}{hint}")
    found = getattr(datasets, name)
    if not (inspect.isclass(found) and issubclass(found, Dataset)):
        raise ValueError(f"name: torch_geometric.datasets.{name} is not a data set")
    return found


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
