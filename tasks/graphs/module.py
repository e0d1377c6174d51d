"""The LightningModule of node classification; users subclass it or copy it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC

from attnkit.core.masks.remembered import remembered_edges
from attnkit.layers.graph.attention import GraphAttention
from attnkit.layers.graph.convolution import GraphConvolution
from attnkit.lightning import ClassificationModule, UserError
from attnkit.lightning.export.program import Program
from attnkit.lightning.modules.classification import ClassWeights, probability_columns
from attnkit.lightning.protocols import Explained
from attnkit.tasks.graphs.checks import CARRIED
from attnkit.tasks.graphs.layerwise import layerwise
from attnkit.tasks.graphs.parts import GraphPart, sampled_field


class NodeClassification(ClassificationModule):
    """One label per node: cross-entropy, accuracy, of two classes ROC-AUC, scores per class.

    A batch is a `torch_geometric.data.Data` with x, edge_index and y. The loss and the metrics of a
    stage are of the nodes in its `train_mask`, `val_mask` or `test_mask`; of a sampled sub-graph
    (one with a `batch_size`, as PyG's `NeighborLoader` and our `NeighborBatches` give), of its
    first `batch_size` nodes. What the edges of the data carry, `edge_attr` [edges, channels] and
    `edge_weight` [edges], goes to a model that takes it, by these names, and of what it does not
    take a line says so. Nothing is computed but what the logits of a stage's nodes depend on
    (`attnkit.layers.ReceptiveField`), where the model says in `num_hops` how far that is.

    Logged, tested and shown is what `ClassificationModule` says, and of two classes `val/auroc` and
    `test/auroc`, the exact area under the ROC curve of the second one's probability.

    Args:
        model: (x [nodes, in_channels], edge_index [2, edges]) to logits [nodes, num_classes]; may
            take `edge_attr`, `edge_weight`, and `batch`, the graph of each node in a batch of
            graphs; a module, or its configuration (see `TaskModule`).
        optimizer, scheduler, finetune: see `TaskModule`.
        num_classes: at least 2.
        class_names: for tables; "0", "1", … unless given.
        in_channels: features of a node; data with others is then refused.
        class_weights: see `ClassificationModule`.
    """

    level = "node"

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        optimizer: Callable[..., Optimizer] | Mapping[str, Any] | None = None,
        scheduler: Callable[..., LRScheduler] | Mapping[str, Any] | None = None,
        finetune: Callable[[nn.Module], Any] | Mapping[str, Any] | None = None,
        *,
        num_classes: int,
        class_names: Sequence[str] | None = None,
        in_channels: int | None = None,
        class_weights: ClassWeights | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            scheduler,
            finetune,
            num_classes=num_classes,
            class_names=class_names,
            class_weights=class_weights,
        )
        self.in_channels = in_channels
        self._parts: dict[str, GraphPart] = {}

    def metrics(self) -> dict[str, Metric]:
        metrics = super().metrics()
        if self.num_classes == 2:
            metrics["auroc"] = _BinaryAUROC(validate_args=False)
        return metrics

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = getattr(self.trainer, "datamodule", None)
        check_channels(self, data)
        self._check_positions(data)
        if isinstance(graph := getattr(data, "graph", None), Data):
            check_edges(self.model, graph)
        depth, sampled = num_layers(self.model), getattr(data, "num_neighbors", ())
        if stage == "fit" and getattr(data, "batch_size", None) and 0 < len(sampled) < depth:
            rank_zero_warn(
                f"data.num_neighbors={list(sampled)}: training sees {len(sampled)} hops, but "
                f"{type(self.model).__name__} has {depth} layers; expected {depth} numbers"
            )

    def _check_positions(self, data: Any) -> None:
        """UserError if the model reads other positions than there are."""
        if not hasattr(data, "positions"):
            return
        kind = data.positions
        given = None if kind is None else data.position_dim
        read = getattr(self.model, "position_dim", None)
        if given == read:
            return
        if given is None:
            raise UserError(
                f"data.positions: expected laplacian or random_walk with "
                f"data.position_dim={read}, which the model reads, got null"
            )
        reads = "reads none; model=graph_transformer does" if read is None else f"reads {read}"
        raise UserError(
            f"data.positions={kind} has {given} channels (data.position_dim), "
            f"and {type(self.model).__name__} {reads}"
        )

    def logits(self, batch: Data) -> Tensor:
        """The model's output for a batch. If the model takes `attnkit.Edges` and the batch is the
        whole graph, its edges are sorted only once. A batch of `Layers` reads all neighbours, layer
        by layer."""
        if "whole" in batch:
            hops: Any = self.model.hops
            whole = batch.whole
            return layerwise(
                hops,
                whole.data.x,
                whole.neighbors,
                batch.n_id,
                edge_attr=beside(self.model, whole.data).get("edge_attr"),
            )
        edge_index = batch.edge_index
        given = beside(self.model, batch)
        if "batch" in batch and "batch" in inspect.signature(self.model.forward).parameters:
            given["batch"] = batch.batch  # so that global attention stays in each graph
        if not getattr(self.model, "takes_edges", False):
            return self(batch.x, edge_index, **given)
        # here and not in the model, which may be compiled
        edges = remembered_edges(edge_index, batch.num_nodes, batch.num_nodes)
        return self(batch.x, edges, **given)

    @torch.no_grad()
    def classify(self, batch: Data) -> dict[str, list[Any]]:
        """The classes of the nodes of a graph, or of a sampled sub-graph's seeds.

        Returns:
            of each node `node` (its number), `label` (the name of the most probable class),
            `probability`, and of up to 1,000 classes `p(<class>)`, the probability of each.
        """
        logits = self.logits(batch)
        nodes = batch.n_id if "n_id" in batch else torch.arange(len(logits))
        seeds = slice(batch.batch_size if "batch_size" in batch else None)
        probabilities = logits[seeds].float().softmax(dim=1)
        probability, label = probabilities.max(dim=1)
        return {
            "node": nodes[seeds].tolist(),
            "label": [self.class_names[number] for number in label.tolist()],
            "probability": probability.tolist(),
            **probability_columns(self.class_names, probabilities),
        }

    def explained(self, batch: Data) -> Explained:
        """What `attnkit.explain` is given of a graph: the model, features and edges.

        Raises:
            UserError: a sampled sub-graph.
        """
        if "batch_size" in batch:
            raise UserError("run=explain: nodes need the whole graph: data.batch_size=null")
        if read := ", ".join(beside(self.model, batch)):
            raise UserError(f"run=explain: a model that reads {read} is not explained")
        return Explained(
            self.model, (batch.x, batch.edge_index), class_names=self.class_names, truth=batch.y
        )

    def programs(self) -> dict[str, Program]:
        """`model`: features and edges of a graph of any size to logits; none where the model reads
        positions or edge features."""
        if self.in_channels is None or any(
            getattr(self.model, name, None) is not None for name in ("position_dim", "edge_dim")
        ):
            return {}
        channels = self.in_channels
        return {
            "model": Program(
                self,
                lambda nodes, edges: {
                    "x": torch.randn(nodes, channels),
                    "edge_index": torch.randint(0, nodes, (2, edges)),
                },
                {"x": ("nodes", channels), "edge_index": (2, "edges")},
                ("logits", ("nodes", self.num_classes)),
                {
                    "x": "features of the nodes, dense",
                    "edge_index": "source nodes in row 0, target nodes in row 1; not checked",
                    "logits": "softmax makes probabilities of them",
                },
            )
        }

    def facts(self) -> dict[str, Any]:
        return {"classes": self.class_names}

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        logits, labels = self._of_stage("train", batch)
        losses = functional.cross_entropy(
            logits.float(), labels, self.class_weights, reduction="none"
        )
        plain = None
        if self.class_weights is not None:
            plain = functional.cross_entropy(logits.detach().float(), labels, reduction="none")
        self.log_train_loss(losses, plain)
        return losses.mean()

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self.evaluate("val", *self._of_stage("val", batch))

    def test_step(self, batch: Data, batch_idx: int) -> dict[str, Tensor]:
        """Of the nodes that count `node` (the number), `label` and what is `predicted`."""
        logits, labels = self._of_stage("test", batch)
        self.evaluate("test", logits, labels)
        if "batch_size" in batch:
            nodes = batch.n_id[: batch.batch_size]
        else:
            nodes = batch.test_mask.nonzero().flatten()
        return {"node": nodes, "label": labels, "predicted": logits.argmax(dim=1)}

    def predict_step(self, batch: Data, batch_idx: int) -> dict[str, list[Any]]:
        """What `classify` says of a batch, and behind the number of each node its `name`, if the
        data module has `node_names`."""
        found = self.classify(batch)
        names = getattr(getattr(self.trainer, "datamodule", None), "node_names", None)
        if not names:
            return found
        nodes = found.pop("node")
        return {"node": nodes, "name": [names[node] for node in nodes], **found}

    def _of_stage(self, stage: str, batch: Data) -> tuple[Tensor, Tensor]:
        """Logits and labels of the nodes that count."""
        if "batch_size" in batch:
            seeds = slice(batch.batch_size)
            field = sampled_field(batch, getattr(self.model, "num_hops", None))
            if field is None:
                return self.logits(batch)[seeds], batch.y[seeds]
            return self(batch.x, field, **beside(self.model, batch)), batch.y[seeds]
        mask = batch[f"{stage}_mask"]
        num_hops: Any = getattr(self.model, "num_hops", None)
        if num_hops is None:
            return self.logits(batch)[mask], batch.y[mask]
        part = self._parts.get(stage)
        if part is None or not part.is_of(batch):
            part = self._parts[stage] = GraphPart.of(batch, mask, num_hops)
        if part.field is None:
            return self.logits(batch)[mask], part.labels
        given = beside(self.model, batch)
        if "positions" in given:
            given["positions"] = given["positions"][part.field.nodes]
        return self(part.x, part.field, **given), part.labels


def check_edges(model: nn.Module, graph: Any) -> None:
    """Says what edges carry that the model does not read; UserError if it reads other."""
    carried = [name for name in CARRIED if getattr(graph, name, None) is not None]
    if unread := [name for name in carried if name not in read_of_edges(model)]:
        rank_zero_warn(
            f"data: {' and '.join(unread)} of the edges: not used, since "
            f"{type(model).__name__} reads none"
        )
    read = getattr(model, "edge_dim", None)
    given = graph.edge_attr.shape[1] if "edge_attr" in carried else None
    if read not in (None, given):
        raise UserError(
            f"data: expected edge_attr [edges, {read}], which the model reads (model.edge_dim),"
            f" got {'none' if given is None else f'[edges, {given}]'}"
        )


def beside(model: nn.Module, batch: Data) -> dict[str, Tensor]:
    """What a model is given beside features and edges."""
    carries = any(name in batch for name in CARRIED)
    names = ("positions", *(read_of_edges(model) if carries else ()))
    return {name: batch[name] for name in names if name in batch}


def check_channels(module: Any, data: Any) -> None:
    """UserError if the data's nodes have other features than the module was made for, or the data
    are of another level."""
    given = getattr(data, "in_channels", None)
    if None not in (given, module.in_channels) and given != module.in_channels:
        raise UserError(
            f"data: its nodes have {given} features, but the module was made for "
            f"{module.in_channels}"
        )
    level = getattr(data, "level", module.level)
    if level != module.level:
        what = {
            "node": "its nodes are what is learned",
            "link": "its edges are what is learned",
            "graph": "it holds many graphs",
        }[level]
        raise UserError(
            f"data: {type(data).__name__} is for level={level}, {what}; "
            f"{type(module).__name__} is for level={module.level}"
        )


def read_of_edges(model: nn.Module) -> list[str]:
    """What a model reads of what edges carry: the arguments of its `forward` that are called so.

    PyG's models have arguments that not all of their layers read: they say so in
    `supports_edge_attr`, and layers with an `edge_dim` read nothing where it is None.
    """
    parameters = inspect.signature(model.forward).parameters
    sized = next((module for module in model.modules() if hasattr(module, "edge_dim")), None)
    unread = "edge_attr" if sized is not None and sized.edge_dim is None else ""
    names = [name for name in CARRIED if name in parameters and name != unread]
    return [name for name in names if getattr(model, f"supports_{name}", True)]


def num_layers(model: nn.Module) -> int:
    """The layers of a model that gather along edges; 0 where none are known."""
    known = getattr(model, "num_hops", None) or getattr(model, "num_layers", None)
    layers = (GraphAttention, GraphConvolution, MessagePassing)
    return known or sum(isinstance(module, layers) for module in model.modules())


class _BinaryAUROC(BinaryAUROC):
    """Of logits [samples, 2], so that it is updated as all other metrics are."""

    def update(self, logits: Tensor, labels: Tensor) -> None:
        super().update(logits.softmax(dim=1)[:, 1], labels)
