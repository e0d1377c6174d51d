"""Base class of data modules of many graphs, with targets of graphs or of their nodes."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import combinations
from numbers import Integral
from typing import Literal, get_args

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from attnkit.core.arguments import at_least, choice, held_out
from attnkit.lightning.errors import UserError
from attnkit.lightning.protocols import by_turns
from attnkit.lightning.resume.sampler import stratified_split
from attnkit.tasks.graphs.base import SPLITS, DescribedGraphs, Target, check_training, has_target
from attnkit.tasks.graphs.many_graphs import GraphItems, Graphs
from attnkit.tasks.loaders import make_loader, token_loader
from attnkit.tasks.summary import class_lines, outputs_text, split_line


class GraphsDataModule(DescribedGraphs):
    """Base class of data modules of many graphs; a subclass reads them in `load()`.

    A batch is a `torch_geometric.data.Data` of several graphs without edges between them: `x`,
    `edge_index`, if given `edge_attr` and `edge_weight`, and `y`, `batch`, `ptr` and `number` as
    in `Graphs.batch`. Prediction covers every graph.

    Args:
        level: what has a target in `y`, "graph" or "node". With "node", a model is trained on the
            nodes of some graphs and tested on those of others.
        target: the kind of `y`: "classes", an integer; "labels", several values 0 or 1; or
            "numbers". For labels and numbers, NaN is unknown and does not count.
        val_fraction, test_fraction: shares of the graphs (of each class, if there are classes),
            drawn by `seed`; not used if the data has splits.
        batch_size: graphs per step and process.
        batch_nodes: instead, nodes per step and process: see `TokenSampler`.
        num_workers: number of processes that make batches.
        seed: seed of the splits and the order.

    Raises:
        ValueError: an argument out of range, or not exactly one of batch_size and batch_nodes.
        UserError: in `setup`, if the graphs are not as described.

    Examples:
        >>> class Molecules(GraphsDataModule):
        ...     def load(self):
        ...         return torch.load("molecules.pt", weights_only=False)  # a list of Data
    """

    targets = get_args(Target)
    num_splits = 1

    def __init__(
        self,
        *,
        level: Literal["graph", "node"] = "graph",
        target: Target = "classes",
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        batch_size: int | None = 64,
        batch_nodes: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(target, num_workers, seed)
        choice(("graph", "node"), level=level)
        held_out(val_fraction=val_fraction, test_fraction=test_fraction)
        at_least(1, batch_size=batch_size, batch_nodes=batch_nodes)
        if (batch_size is None) == (batch_nodes is None):
            raise ValueError(
                "batch_nodes: replaces batch_size: expected one of them and null for the other, "
                f"got {batch_nodes} and batch_size={batch_size}"
            )
        self.level = level
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.batch_size = batch_size
        self.batch_nodes = batch_nodes
        self.graph_names: list[str] | None = None
        self.given_splits: dict[str, Tensor] | None = None
        """Numbers of the graphs of "train", "val" and "test"; None: drawn by the seed."""
        self.sets: dict[str, GraphItems] = {}

    @abstractmethod
    def load(self) -> Iterable[Data]:
        """Return the graphs, each with x [nodes, channels], edge_index [2, edges] and y.

        y is one class, or the same number of labels or numbers in all graphs; for targets of nodes
        it is [nodes] or [nodes, outputs]. edge_attr [edges, channels] and edge_weight [edges] are
        optional.

        The method may set `class_names` (of the classes, labels or numbers), `graph_names` (one for
        each graph) and `given_splits`. In a prediction (`self.predicts`), y and splits are not read
        and may be missing.
        """

    def place_of(self, graph: int) -> str:
        """Return where a graph comes from, for messages."""
        return f"data: graph {graph}"

    def setup(self, stage: str | None = None) -> None:
        """Load the graphs and split them, once; a prediction ignores targets and splits."""
        if self._stored is not None and (stage == "predict" or not self.predicts):
            return
        self.predicts = stage == "predict"
        target = None if self.predicts else self.target
        of_nodes = self.level == "node"
        graphs = Graphs.of(self.load(), target, self.place_of, of_nodes=of_nodes)
        self.check_names("graph", self.graph_names, len(graphs))
        if self.batch_nodes is not None and self.batch_nodes < int(graphs.sizes.max()):
            raise UserError(
                f"data.batch_nodes: expected at least {int(graphs.sizes.max())}, the nodes of "
                f"{self.place_of(int(graphs.sizes.argmax())).removeprefix('data: ')}, "
                f"got {self.batch_nodes}"
            )
        self._stored = graphs
        if not self.predicts:
            parts = self._splits(graphs).items()
            self.sets = {name: GraphItems(graphs, part, self.batch_nodes) for name, part in parts}
        self.name_outputs()

    def _splits(self, graphs: Graphs) -> dict[str, Tensor]:
        """Return the numbers of the graphs of each split, after checks of splits and targets."""
        known = graphs.has_target
        what = {"classes": "class", "labels": "label", "numbers": "number"}[self.target]
        if not known.any():
            raise UserError(f"data: no graph has a {what}")
        largest = max(len(graphs.y), len(self.class_names))
        if self.target == "classes" and int(graphs.y.max()) >= largest:
            row = int(graphs.y.argmax())
            if graphs.of_nodes:
                row = int(torch.searchsorted(graphs.node_starts, row, right=True)) - 1
            raise UserError(
                f"{self.place_of(row)}: expected a class of 0 to {largest - 1}, "
                f"got {int(graphs.y.max())}"
            )
        if self.given_splits is None:
            numbers = known.nonzero().flatten()
            has_class = self.target == "classes" and not graphs.of_nodes
            strata = graphs.y[numbers] if has_class else torch.zeros_like(numbers)
            fractions = [self.val_fraction, self.test_fraction]
            parts = [numbers[part] for part in stratified_split(strata, fractions, self.seed)]
            splits = dict(zip(SPLITS, parts, strict=True))
        else:
            splits = self.given_splits
        for name, part in splits.items():
            if not len(part):
                raise UserError(f"data: no graphs for {name}")
            if int(part.min()) < 0 or int(part.max()) >= len(known):
                raise UserError(
                    f"data: expected graphs 0 to {len(known) - 1} for {name}, "
                    f"got {int(part.min())} to {int(part.max())}"
                )
            if len(unknown := part[~known[part]]):
                raise UserError(
                    f"{self.place_of(int(unknown[0]))}: it is in {name}, but has no {what}"
                )
        for one, other in combinations(splits, 2):
            if len(both := splits[one][torch.isin(splits[one], splits[other])]):
                rank_zero_warn(
                    f"data: {one} and {other} share graphs ({len(both):,}, such as {int(both[0])})"
                )
        y = graphs.targets(splits["train"])
        if self.target == "classes":
            later = torch.cat([graphs.targets(splits[name]) for name in ("val", "test")])
            unseen = later[has_target(later) & ~torch.isin(later, y)].unique().tolist()
            if unseen:
                some = ", ".join(map(str, unseen[:5])) + ", …" * (len(unseen) > 5)
                rank_zero_warn(f"data: no training {self.level} has class {some}")
        else:
            check_training(y, self.target, self.class_names, self.level)
        return splits

    @property
    def graphs(self) -> Graphs:
        """All graphs, after `setup`."""
        return self.stored

    @property
    def train_labels(self) -> Tensor:
        """Known targets of the training graphs, or of their nodes."""
        y = self.graphs.targets(self.sets["train"].numbers)
        return y[has_target(y)]

    def summary(self) -> list[str]:
        """Return a summary of the data in a few lines; after `setup`."""
        graphs, sizes = self.graphs, self.graphs.sizes
        counts = {name: len(items) for name, items in self.sets.items()}
        what = outputs_text(self.target, self.num_outputs) + " of the nodes" * graphs.of_nodes
        lines = [
            split_line("graphs", counts, what),
            f"  {int(sizes.min()):,} to {int(sizes.max()):,} nodes with {self.in_channels:,} "
            f"features, {len(graphs.x):,} nodes and {graphs.edge_index.shape[1]:,} edges in all",
        ]
        if self.target == "classes":
            labels = {name: graphs.targets(items.numbers) for name, items in self.sets.items()}
            known = {name: y[has_target(y)] for name, y in labels.items()}
            lines += class_lines(known, self.class_names)
        return lines

    def __str__(self) -> str:
        if self._stored is None:
            return f"{type(self).__name__} (not set up)"
        found = (
            f"{type(self).__name__}: {len(self.graphs):,} graphs, {len(self.graphs.x):,} nodes, "
            f"{self.in_channels:,} features"
        )
        if self.predicts:  # without targets and splits
            return found
        counts = " / ".join(f"{len(items):,}" for items in self.sets.values())
        return (
            f"{found}, {self.num_outputs} {self.target}; {counts} graphs to train, validate, test"
        )

    def to_explain(self, count: int, numbers: Sequence[int] | None = None) -> tuple[Data, str]:
        """Return a batch of graphs for `run=explain`, and how they were chosen.

        Args:
            count: number of graphs from the test data, from each class in turn.
            numbers: numbers of graphs, instead of `count`.

        Raises:
            UserError: there is no such graph, or it has no edges to explain.
        """
        has_edges = self.graphs.edge_starts.diff() > 0
        for number in numbers or ():
            if not isinstance(number, Integral) or not 0 <= number < len(self.graphs):
                last = len(self.graphs) - 1
                raise UserError(
                    f"explain.graphs: expected numbers from 0 to {last}, got {number!r}"
                )
            if not has_edges[number]:
                raise UserError(
                    f"explain.graphs: graph {number} has no edges to explain; leave it out"
                )
        if numbers is not None:
            return self.graphs.batch(torch.tensor(list(numbers))), ""
        test = self.sets["test"].numbers
        some = test[has_edges[test]]
        if not len(some):
            raise UserError("data: no graph of test has edges to explain")
        places, how = list(range(min(count, len(some)))), "the first ones"
        if self.target == "classes":
            places, how = by_turns(self.graphs.y[some].tolist(), count), "from each class in turn"
        shown = f"shown: {len(places)} of {len(test):,} test graphs, {how}"
        return self.graphs.batch(some[places]), shown

    def loader(self, split: str) -> DataLoader:
        if split == "predict":
            items = GraphItems(self.graphs, torch.arange(len(self.graphs)), self.batch_nodes)
        else:
            items = self.sets[split]
        make = make_loader if self.batch_nodes is None else token_loader
        return make(self, items, split, "graphs")
