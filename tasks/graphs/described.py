"""Base class of the data modules of one graph and of many: targets, names and sizes."""

from typing import Any

from lightning.pytorch.utilities.types import EVAL_DATALOADERS

from attnkit.core.arguments import at_least, choice
from attnkit.lightning.errors import UserError
from attnkit.tasks.graphs.checks import Target
from attnkit.tasks.loaders import SplitData


class DescribedGraphs(SplitData):
    """Data module with a class, labels or numbers as the target of each node or graph."""

    targets: tuple[Target, ...]
    """Allowed values of `target`."""

    def __init__(self, target: Target, num_workers: int, seed: int) -> None:
        super().__init__()
        choice(self.targets, target=target)
        at_least(0, num_workers=num_workers, seed=seed)
        self.target: Target = target
        self.num_workers = num_workers
        self.seed = seed
        self.predicts = False
        """Whether targets and splits are not read, and may be missing."""
        self.class_names: list[str] = []
        self._stored: Any = None

    @property
    def stored(self) -> Any:
        """The object with x, y and edge_attr of all nodes and edges, after `setup`."""
        if self._stored is None:
            raise RuntimeError("call setup() first: nothing is loaded yet")
        return self._stored

    @property
    def num_outputs(self) -> int:
        """Number of classes, labels or numbers of a node or graph."""
        return self.num_classes if self.target == "classes" else self.stored.y.shape[1]

    @property
    def num_classes(self) -> int:
        return max(int(self.stored.y.max()) + 1, len(self.class_names))

    @property
    def in_channels(self) -> int:
        """Number of features of a node."""
        return self.stored.x.shape[1]

    def check_names(self, kind: str, names: list[str] | None, count: int) -> None:
        """Raise a `UserError` if the number of names of nodes, graphs or classes is wrong."""
        if names is not None and len(names) != count:
            each = "" if kind == "class" else f", one for each {kind}"
            raise UserError(f"data: expected {count} {kind}_names{each}, got {len(names)}")

    def name_outputs(self) -> None:
        """Check the names of classes, labels or numbers; number them if they have none.

        For prediction there are none, since the module has them.
        """
        self.class_names = [] if self.predicts else self.class_names
        if not self.predicts:
            self.check_names("class", self.class_names or None, self.num_outputs)
            self.class_names = self.class_names or [*map(str, range(self.num_outputs))]

    def describe(self) -> dict[str, Any]:
        """Return the facts that a model and a module need, as plain values; after `setup`."""
        edge_attr = self.stored.edge_attr
        return {
            "in_channels": self.in_channels,
            "out_channels": self.num_outputs,  # what PyG's models call it
            "num_classes": self.num_outputs,
            "num_outputs": self.num_outputs,
            "class_names": self.class_names,
            "target": self.target,
            **({} if edge_attr is None else {"edge_dim": edge_attr.shape[1]}),
        }

    def predict_dataloader(self) -> EVAL_DATALOADERS:
        return self.loader("predict")
