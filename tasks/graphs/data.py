"""Base class of data modules of one graph, for tasks on its nodes or links."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import homophily

from attnkit.core.arguments import at_least, choice
from attnkit.lightning.errors import UserError
from attnkit.lightning.modules.module import TaskModule, unknown_part, was_trained_on
from attnkit.lightning.resume.sampler import EpochSampler
from attnkit.tasks.graphs.base import (
    CARRIED,
    SPLITS,
    DescribedGraphs,
    Target,
    check_finite,
    check_training,
    checked,
    has_target,
    oddities_of,
)
from attnkit.tasks.graphs.datasets.part import Part
from attnkit.tasks.graphs.features import Positions, node_positions, normalized, to_sparse_csr
from attnkit.tasks.graphs.link_data import Links, LinkSets
from attnkit.tasks.graphs.negative_pairs import HeldOut
from attnkit.tasks.graphs.sampling import (
    InNeighbors,
    Layers,
    NeighborBatches,
    in_neighbors,
    pyg_neighbor_loader,
)
from attnkit.tasks.graphs.splits import are_alike, node_keys
from attnkit.tasks.loaders import is_limited, loader_options, make_loader, module_of
from attnkit.tasks.summary import class_lines, outputs_text, split_line

SPARSE = 0.1  # features with a smaller share of nonzero numbers are kept sparse


class GraphDataModule(DescribedGraphs):
    """Data module of one graph with a target for each node; a subclass reads it in `load()`.

    A batch is a `torch_geometric.data.Data` with x [nodes, in_channels], edge_index [2, edges]
    (source in row 0), y [nodes] or [nodes, outputs] and the masks train_mask, val_mask, test_mask
    [nodes]: the whole graph, once per epoch. With a `batch_size` it is a sub-graph sampled around
    that many nodes of the split (see `NeighborBatches`). Validation, test and prediction then read
    all neighbours, layer by layer in blocks of nodes (see `layerwise`), if the model supports it,
    as attnkit's do; otherwise they are sampled, too. Prediction covers every node.

    Args:
        target: the kind of y: "classes", an integer; "labels", several values 0 or 1; or "numbers".
            For labels and numbers, NaN is unknown and does not count.
        split: the number of the fixed split to use.
        normalize_features: divide each row of x by the sum of its absolute values (a row of zeros
            stays), as GAT does with bags of words.
        sparse_features: return x as sparse CSR, for models whose first layer takes it. None: if
            fewer than a tenth of its numbers are nonzero, as in bags of words; with a batch_size
            dense features stay dense, since they may be mapped from a file.
        positions: positional encodings, "laplacian" or "random_walk" (see `node_positions`), for
            models with `position_dim`; None for none.
        position_dim: channels of the positional encodings.
        batch_size: nodes per step and process; None: the whole graph.
        num_neighbors: with a batch_size, neighbours per node and layer, -1 for all.
        evaluation: with a batch_size, how to validate, test and predict: "layers" or "sampled";
            None: by layers if the model can, unless the trainer limits the batches.
        sampler: what samples neighbours: attnkit, or PyG's `NeighborLoader`, which needs pyg-lib.
        num_workers: number of processes that sample.
        seed: seed of everything random here.
        links: predict links between nodes instead (see `Links`); `batch_size` then counts edges.

    Raises:
        ValueError: an argument is out of range.
        UserError: in `setup`, if the split does not exist or the graph does not have this form.

    Examples:
        >>> class Citations(GraphDataModule):
        ...     def load(self):
        ...         return torch.load("citations.pt", weights_only=False)  # a Data
    """

    targets = get_args(Target)

    def __init__(
        self,
        *,
        target: Target = "classes",
        split: int = 0,
        normalize_features: bool = False,
        sparse_features: bool | None = False,
        positions: Positions | None = None,
        position_dim: int = 16,
        batch_size: int | None = None,
        num_neighbors: Sequence[int] = (10, 10),
        evaluation: Literal["layers", "sampled"] | None = None,
        sampler: Literal["attnkit", "pyg"] = "attnkit",
        num_workers: int = 0,
        seed: int = 0,
        links: Links | None = None,
    ) -> None:
        super().__init__(target, num_workers, seed)
        at_least(0, split=split)
        at_least(1, batch_size=batch_size, position_dim=position_dim)
        if positions is not None:
            choice(get_args(Positions), positions=positions)
        choice(("attnkit", "pyg"), sampler=sampler)
        if evaluation is not None:
            choice(("layers", "sampled"), evaluation=evaluation)
        if not num_neighbors or any(count < -1 for count in num_neighbors):
            raise ValueError(
                f"num_neighbors: expected a number per layer, -1 for all, got {list(num_neighbors)}"
            )
        self.split = split
        self.normalize_features = normalize_features
        self.sparse_features = sparse_features
        self.positions = positions
        self.position_dim = position_dim
        self.batch_size = batch_size
        self.num_neighbors = list(num_neighbors)
        self.evaluation = evaluation
        self.sampler = sampler
        self.links = links
        self.level = "node" if links is None else "link"
        if not isinstance(links, Links | None):
            raise ValueError(f"links: expected Links, got {type(links).__name__}")
        if links is not None:
            links.check(self)
        self.node_names: list[str] | None = None
        self._features: Part | None = None  # where x and y are read from, if from files
        self._labels: Part | None = None
        self._batch_of: dict[str, Any] = {}
        self._has_trained = False
        self._keys: Tensor | None = None
        self._num_splits = 0
        self._neighbors: InNeighbors | None = None
        self.link_splits: dict[str, HeldOut] = {}
        self._link_sets: LinkSets | None = None

    @abstractmethod
    def load(self) -> Data:
        """Return the graph: x, edge_index, y, and masks [nodes] or [nodes, splits].

        It may have edge_attr [edges, channels] and edge_weight [edges], for models that take
        arguments of these names. For prediction (`self.predicts`), y and the masks are not read and
        may be missing.

        It may set `class_names`, the names of classes, labels or numbers (otherwise they are
        numbered); `node_names`, one for each node; and with `links` also `link_splits`, the edges
        of "val" and "test" (see `HeldOut`), which the graph must then not contain.
        """

    def setup(self, stage: str | None = None) -> None:
        """Load the graph and choose the split, once; prediction ignores labels and splits."""
        if self._stored is not None and (stage == "predict" or not self.predicts or self.links):
            return
        self.predicts = stage == "predict" or self.links is not None
        data = self._loaded()
        check_finite(data.x, self.place_of)
        if found := [f"{name} {list(data[name].shape)}" for name in CARRIED if name in data]:
            rank_zero_warn(
                f"data: edges carry {' and '.join(found)}, for models that take what is called so"
            )
        self._num_splits = data.train_mask.shape[1]
        has_splits = not self.predicts or bool(data.train_mask.any())
        if has_splits and self.split >= self._num_splits:
            expected = f"0 to {self._num_splits - 1}" if self._num_splits > 1 else "0, the only one"
            raise UserError(f"data.split: expected {expected}, got {self.split}")
        for name in SPLITS:
            mask = data[f"{name}_mask"][:, min(self.split, self._num_splits - 1)].contiguous()
            data[f"{name}_mask"] = mask
            if self.predicts:
                continue
            if not mask.any():
                raise UserError(f"data: no nodes for {name} in split {self.split}")
            unlabelled = (mask & ~has_target(data.y)).nonzero()
            if len(unlabelled):
                node = int(unlabelled[0])
                raise UserError(f"{self.label_of(node)}: node {node} of {name} has no label")
        if not self.predicts and (oddities := oddities_of(data)):
            rank_zero_warn(f"data: {'; '.join(oddities)}")
        if not self.predicts and self.target != "classes":
            check_training(data.y[data.train_mask], self.target, self.class_names, "node")
        self._keys = node_keys(data) if self.normalize_features else None
        data.x = self._prepared(data.x)
        if self.positions is not None:
            data.positions = node_positions(data, self.positions, self.position_dim, self.seed)
        self.check_names("node", self.node_names, data.num_nodes)
        self._stored = data
        if self.links is not None:
            self._link_sets = LinkSets(data, self.links, self.seed, self.link_splits)
        self.name_outputs()

    def _loaded(self) -> Data:
        """Return the checked graph; with links, without labels and splits of its nodes."""
        options: dict[str, Any] = {"predicts": self.predicts}
        options["label_of"] = lambda node: f"{self.label_of(node)}: node {node}"
        data = self.load()
        if self.links is not None and isinstance(data, Data):
            self.links.check_splits(self)
            unread = {"y", *(f"{split}_mask" for split in SPLITS)}
            data = Data.from_dict({k: v for k, v in data.to_dict().items() if k not in unread})
        return checked(data, self.target, **options)

    def place_of(self, node: int) -> str:
        """Return where the features of a node are written, for messages."""
        part = self._features
        return f"data: x of node {node}" if part is None else part.node_place(node)

    def label_of(self, node: int) -> str:
        """Return where the label of a node is written, for messages."""
        return "data" if self._labels is None else self._labels.place_of(node)

    def _prepared(self, x: Tensor) -> Tensor:
        """Return the features in the form that is used; mapped files stay mapped for batches."""
        is_sparse = self.sparse_features
        if is_sparse is None:
            may_be_mapped = self.batch_size is not None and x.layout == torch.strided
            is_sparse = not may_be_mapped and int(x.to_dense().count_nonzero()) < SPARSE * x.numel()
        if self.batch_size is None or is_sparse or self.normalize_features:
            x = x.float()
        x = to_sparse_csr(x) if is_sparse else x.to_dense()
        return normalized(x) if self.normalize_features else x

    @property
    def graph(self) -> Data:
        """The graph, after `setup`."""
        return self.stored

    @property
    def _whole(self) -> Data:
        """The whole graph as a batch: a copy, since PyG moves a graph to a device in place. All
        stages share it while the graph is unchanged, so that a GPU holds it once."""
        holds = self.graph.to_dict()
        if self._batch_of.keys() != holds.keys() or any(
            self._batch_of[name] is not value for name, value in holds.items()
        ):
            self._batch_of, self._batch = holds, copy(self.graph)
        return self._batch

    @property
    def num_splits(self) -> int:
        """The number of fixed splits, 1 if the seed makes the split. Loads the data."""
        if not self._num_splits:
            self._num_splits = self._loaded().train_mask.shape[1]
        return self._num_splits

    @property
    def is_undirected(self) -> bool:
        """Whether every edge is there in both directions."""
        return self.graph.is_undirected()

    @property
    def homophily(self) -> float:
        """The share of edges between nodes of one class (Zhu et al., 2020)."""
        return homophily(self.graph.edge_index, self.graph.y, method="edge")

    @property
    def train_labels(self) -> Tensor:
        """The targets of the nodes to train on."""
        return self.graph.y[self.graph.train_mask]

    def describe(self) -> dict[str, Any]:
        if self._link_sets is not None:
            return self._link_sets.describe()
        positions = {} if self.positions is None else {"position_dim": self.position_dim}
        return {**super().describe(), **positions}

    def summary(self) -> list[str]:
        """Return a summary of the data in a few lines; after `setup`."""
        if self._link_sets is not None:
            return self._link_sets.summary()
        graph = self.graph
        labels = {name: graph.y[graph[f"{name}_mask"]] for name in SPLITS}
        split = f"; split {self.split + 1} of {self.num_splits}" if self.num_splits > 1 else ""
        counts = {name: len(found) for name, found in labels.items()}
        has_classes = self.target == "classes"
        return [
            split_line("nodes", counts, outputs_text(self.target, self.num_outputs) + split),
            f"  of {graph.num_nodes:,} nodes with {self.in_channels:,} features, "
            f"{graph.num_edges:,} edges",
            *(class_lines(labels, self.class_names) if has_classes else ()),
        ]

    def __str__(self) -> str:
        if self._stored is None:
            return f"{type(self).__name__} (not set up)"
        if self._link_sets is not None:
            return f"{type(self).__name__}: {self._link_sets}"
        kind = "undirected" if self.is_undirected else "directed"
        counts = [int(self.graph[f"{name}_mask"].sum()) for name in SPLITS]
        alike = f", homophily {self.homophily:.2f}" if self.target == "classes" else ""
        return (
            f"{type(self).__name__}: {self.graph.num_nodes:,} nodes, "
            f"{self.graph.num_edges:,} edges ({kind}), {self.in_channels:,} features, "
            f"{self.num_outputs} {self.target}{alike}; "
            f"split {self.split + 1} of {self.num_splits}: "
            f"{counts[0]:,} / {counts[1]:,} / {counts[2]:,} nodes to train, validate, test"
        )

    def training_keys(self) -> Tensor:
        """Return keys of the nodes of train and val, int64 [nodes]; see `TaskModule`."""
        if self._link_sets is not None:
            return self._link_sets.training_keys(self._node_keys())
        self._has_trained = True
        return self._node_keys()[self.graph.train_mask | self.graph.val_mask]

    def _node_keys(self) -> Tensor:
        """Return keys of all nodes by their features as loaded."""
        return node_keys(self.graph) if self._keys is None else self._keys

    def _tested(self) -> Data:
        """Return the graph to test on, without the nodes of the module's earlier training.

        Nodes that train and test share in this data are kept; training has warned of them.
        """
        graph, module = self.graph, module_of(self)
        if not isinstance(module, TaskModule):
            return self._whole
        known = was_trained_on(module, self._node_keys())
        if known is None:
            rank_zero_warn("test: it is not known which nodes the module was trained on")
            return self._whole
        more = unknown_part(module)
        left = graph.test_mask & ~(known & ~(graph.train_mask | graph.val_mask))
        count, total = int(left.sum()), int(graph.test_mask.sum())
        if count < total and self._has_trained:
            rank_zero_warn(
                f"test: {total - count:,} of {total:,} nodes were in earlier trainings{more}"
            )
        elif count < total:
            alike = int((are_alike(graph.x) & graph.test_mask & ~left).sum())
            if alike:  # features such as all ones or a degree do not identify a node
                more = (
                    f"; {alike:,} of them share their features with other nodes, so that only "
                    f"their number and label match{more}"
                )
            if not count:
                raise UserError(
                    f"data: expected nodes to test, got none: all {total:,} were in the module's "
                    f"training{more}\n  test it with the data.seed, data.split and fractions of "
                    "its training, or on another graph, whose nodes have other features"
                )
            rank_zero_warn(
                f"test: {count:,} of {total:,} nodes; the others were in the module's training, "
                f"which had another data.seed, data.split or other settings of the split{more}"
            )
            graph = copy(self._whole)
            graph.test_mask = left
            return graph
        if more:
            rank_zero_warn(f"test: {total:,} nodes{more}")
        return self._whole

    def _links_loader(self, sets: LinkSets, split: str) -> Any:
        if split == "test":
            items = sets.tested(module_of(self), self._node_keys())
        else:
            items = sets.items(split, self.batch_size or 1)
        size = self.batch_size if split == "train" else len(items)
        return make_loader(self, items, split, "edges", shuffled=EpochSampler, batch_size=size)

    def loader(self, split: str) -> Any:
        if self._link_sets is not None:
            return self._links_loader(self._link_sets, split)
        graph = self._tested() if split == "test" else self._whole
        if self.batch_size is None:
            return FullGraph(graph)
        every = torch.ones(graph.num_nodes, dtype=torch.bool)
        mask = every if split == "predict" else graph[f"{split}_mask"]
        seeds = mask.nonzero().flatten()
        by_layers = split != "train" and self._by_layers(split)
        if self.sampler == "pyg" and not by_layers:
            options = loader_options(self, seeds, split, "nodes")
            return pyg_neighbor_loader(graph, seeds, self.num_neighbors, **options)
        if self._neighbors is None:
            self._neighbors = in_neighbors(graph)
        batches = NeighborBatches(graph, seeds, self.num_neighbors, self.seed, self._neighbors)
        if by_layers:
            return Layers(batches, loader_options(self, seeds, split, "nodes")["sampler"])
        return make_loader(self, batches, split, "nodes", shuffled=EpochSampler)

    def _by_layers(self, split: str) -> bool:
        """Return whether the nodes of a split are computed layer by layer."""
        can = getattr(getattr(module_of(self), "model", None), "hops", None) is not None
        if self.evaluation == "layers" and not can:
            raise UserError(
                "data.evaluation: layers needs a model that can be computed layer by layer, as "
                "attnkit's without global attention can; expected sampled"
            )
        if self.evaluation is None:
            return can and not is_limited(self.trainer, split)
        return self.evaluation == "layers"


class FullGraph:
    """Loader whose only batch is the whole graph, in every process.

    It is no `DataLoader`, since there is nothing to sample, collate or share between processes.
    """

    def __init__(self, graph: Data) -> None:
        self.graph = graph

    def __iter__(self) -> Iterator[Data]:
        yield self.graph

    def __len__(self) -> int:
        return 1
