"""LightningModules that predict a class, several labels or numbers of each node."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch_geometric.data import Data
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC

from attnkit.core.masks.edges import Edges, remembered_edges
from attnkit.layers.graph.receptive_field import ReceptiveField
from attnkit.lightning import UserError
from attnkit.lightning.protocols import Explained
from attnkit.tasks.graphs.base import has_target
from attnkit.tasks.graphs.module import LearnsClasses, LearnsValues, OfGraphs, beside, num_layers
from attnkit.tasks.graphs.sampling import layerwise

MOST = 0.8  # share of the edges above which a part of the graph is not worth a copy of its features


def sampled_field(batch: Data, num_hops: int | None) -> ReceptiveField | None:
    """Return the receptive field of a sub-graph's seeds; None without the sizes of all hops."""
    sizes, counts = batch.get("num_sampled_nodes"), batch.get("num_sampled_edges")
    if not sizes or not counts or len(counts) != num_hops:
        return None
    nodes, edges = list(accumulate(sizes)), list(accumulate(counts))
    return ReceptiveField(
        torch.arange(nodes[-1], device=batch.x.device),
        tuple(
            Edges(batch.edge_index[:, : edges[hop]], nodes[hop], nodes[hop + 1])
            for hop in reversed(range(num_hops))
        ),
        tuple(torch.arange(edges[hop]) for hop in reversed(range(num_hops))),
    )


@dataclass(frozen=True, eq=False)
class GraphPart:
    """The part of a graph that a stage's logits depend on; `field` is None if it is nearly all."""

    graph: Data
    x: Tensor
    labels: Tensor
    field: ReceptiveField | None

    @classmethod
    def of(cls, graph: Data, mask: Tensor, num_hops: int) -> GraphPart:
        wanted = mask.nonzero().squeeze(1)
        field = ReceptiveField.of(graph.edge_index, graph.num_nodes, wanted, num_hops)
        labels = graph.y[mask]
        if field.num_edges > MOST * num_hops * graph.num_edges:
            return cls(graph, graph.x, labels, None)
        return cls(graph, field.rows(graph.x), labels, field)

    def is_of(self, graph: Data) -> bool:
        return self.graph.edge_index is graph.edge_index and self.graph.x is graph.x


class Nodes(OfGraphs):
    """Base class of all modules that predict nodes.

    A batch is a `torch_geometric.data.Data` with x, edge_index and y. Loss and metrics of a stage
    count the nodes in its `train_mask`, `val_mask` or `test_mask`; in a sampled sub-graph (with a
    `batch_size`, as from PyG's `NeighborLoader` and our `NeighborBatches`) the first `batch_size`
    nodes; in a batch of many graphs (`GraphsDataModule`) all nodes whose y is known.

    A model with the arguments `edge_attr` [edges, channels] and `edge_weight` [edges] is given
    these attributes of the edges; a warning names those that it does not read. If the model has
    `num_hops`, only what the outputs of a stage's nodes depend on is computed
    (`attnkit.layers.ReceptiveField`).
    """

    level = "node"
    first_columns: tuple[str, ...] = ("graph", "node", "name")
    in_units: Callable[[Tensor], Tensor]
    class_names: list[str]

    @cached_property
    def _parts(self) -> dict[str, GraphPart]:
        return {}

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = getattr(self.trainer, "datamodule", None)
        self._check_positions(data)
        depth, sampled = num_layers(self.model), getattr(data, "num_neighbors", ())
        if stage == "fit" and getattr(data, "batch_size", None) and 0 < len(sampled) < depth:
            rank_zero_warn(
                f"data.num_neighbors={list(sampled)}: training sees {len(sampled)} hops, but "
                f"{type(self.model).__name__} has {depth} layers; expected {depth} numbers"
            )

    def _check_positions(self, data: Any) -> None:
        """Raise a `UserError` if the model reads other positions than the data has."""
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
        """Return the outputs of all nodes of a batch, [nodes, num_outputs].

        They are logits, or numbers in the units of the data. If the model takes `attnkit.Edges` and
        the batch is the whole graph, its edges are sorted only once. For a batch of `Layers`, all
        neighbours are read, layer by layer.
        """
        if "whole" in batch:
            hops: Any = self.model.hops
            whole = batch.whole
            edge_attr = beside(self.model, whole.data).get("edge_attr")
            return self.in_units(
                layerwise(hops, whole.data.x, whole.neighbors, batch.n_id, edge_attr=edge_attr)
            )
        edge_index = batch.edge_index
        given = beside(self.model, batch)
        if "batch" in batch and "batch" in inspect.signature(self.model.forward).parameters:
            given["batch"] = batch.batch  # so that global attention stays in each graph
        if not getattr(self.model, "takes_edges", False):
            return self(batch.x, edge_index, **given)
        # sorted here and not in the model, which may be compiled
        edges = remembered_edges(edge_index, batch.num_nodes, batch.num_nodes)
        return self(batch.x, edges, **given)

    @torch.no_grad()
    def classify(self, batch: Data) -> dict[str, list[Any]]:
        """Return predictions of the nodes of a graph, or of a sampled sub-graph's seeds.

        Returns:
            columns by name: `node`, the number of a node; for many graphs `graph` precedes it, and
            the number is that within the graph. For classes `label`, `probability` and, for up to
            1,000 of them, `p(<class>)` follow; for labels `p(<label>)`; or each number by its name.
        """
        outputs = self.logits(batch)
        seeds = slice(batch.batch_size if "batch_size" in batch else None)
        nodes = batch.n_id if "n_id" in batch else torch.arange(len(outputs))
        found = {"node": nodes[seeds].tolist()}
        if "number" in batch:
            numbers = torch.arange(len(outputs), device=batch.ptr.device) - batch.ptr[batch.batch]
            found = {"graph": batch.number[batch.batch].tolist(), "node": numbers.tolist()}
        return {**found, **self.columns(outputs[seeds])}

    def explained(self, batch: Data) -> Explained:
        """Return the inputs of `attnkit.explain`: the model, features and edges.

        For labels and numbers the model is this module, with outputs in the units of the data.

        Raises:
            UserError: the batch is a sampled sub-graph or has many graphs, or the model reads
                positions or attributes of edges.
        """
        if "batch_size" in batch:
            raise UserError("run=explain: nodes need the whole graph: data.batch_size=null")
        if "number" in batch:
            raise UserError(
                "run=explain: the nodes of many graphs are not explained; expected one graph"
            )
        if read := ", ".join(beside(self.model, batch)):
            raise UserError(f"run=explain: a model that reads {read} is not explained")
        has_classes = "classes" in self.targets
        of: Any = {"labels": "sigmoid", "numbers": "logit"}.get(self.targets[0], "probability")
        return Explained(
            self.model if has_classes else self,  # numbers in the units of the data
            (batch.x, batch.edge_index),
            class_names=self.class_names,
            truth=batch.y if has_classes else None,
            of=of,
        )

    def test_step(self, batch: Data, batch_idx: int) -> dict[str, Tensor]:
        """Return `node` (numbers), `label` and `predicted` (classes or outputs).

        They are those of the nodes that count.
        """
        outputs, truth = self._of_stage("test", batch)
        self.evaluate("test", outputs, truth)
        if "batch_size" in batch:
            nodes = batch.n_id[: batch.batch_size]
        else:
            nodes = _counted("test", batch).nonzero().flatten()
        predicted = outputs.argmax(dim=1) if "classes" in self.targets else outputs
        return {"node": nodes, "label": truth, "predicted": predicted}

    def predict_step(self, batch: Data, batch_idx: int) -> dict[str, list[Any]]:
        """Return the columns of `classify`, with names of nodes or of their graphs, if known."""
        return self.named(self.classify(batch))

    def _of_stage(self, stage: str, batch: Data) -> tuple[Tensor, Tensor]:
        """Return outputs and truth of the nodes that count."""
        num_hops: Any = getattr(self.model, "num_hops", None)
        if "batch_size" in batch:
            seeds = slice(batch.batch_size)
            field = sampled_field(batch, num_hops)
            if field is None:
                return self.logits(batch)[seeds], batch.y[seeds]
            return self(batch.x, field, **beside(self.model, batch)), batch.y[seeds]
        mask = _counted(stage, batch)
        if num_hops is None or "number" in batch:
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


def _counted(stage: str, batch: Data) -> Tensor:
    """Return which nodes of whole graphs count, bool [nodes]."""
    return has_target(batch.y) if "number" in batch else batch[f"{stage}_mask"]


class NodeClassification(LearnsClasses, Nodes):
    """Predicts one class per node: cross-entropy, accuracy, ROC-AUC of two classes, class scores.

    `Nodes` describes a batch, and which of its nodes count. The module logs, tests and shows what
    `ClassificationModule` does, and for two classes `val/auroc` and `test/auroc`, the exact area
    under the ROC curve of the second class's probability.

    Args:
        model: (x [nodes, in_channels], edge_index [2, edges]) to logits [nodes, num_classes]; may
            take `edge_attr`, `edge_weight`, and `batch`, the graph of each node in a batch of
            graphs; a module, or its configuration (see `TaskModule`).
        optimizer, scheduler, finetune: see `TaskModule`.
        num_classes: at least 2.
        class_names: for tables; "0", "1", … unless given.
        in_channels: number of features of a node; if given, data with another number is refused.
        class_weights: see `ClassificationModule`.
    """

    def metrics(self) -> dict[str, Metric]:
        metrics = super().metrics()
        if self.num_classes == 2:
            metrics["auroc"] = _BinaryAUROC(validate_args=False)
        return metrics


class NodeValues(LearnsValues, Nodes):
    """Predicts several labels or numbers of each node: see `ValuesModule`.

    `Nodes` describes a batch, and which of its nodes count.

    Args:
        model: as for `NodeClassification`, with output [nodes, num_outputs].
        optimizer, scheduler, finetune: see `TaskModule`.
        target: "labels" or "numbers".
        num_outputs: number of labels or numbers of a node.
        class_names: names of the outputs, for tables; "0", "1", … unless given.
        in_channels: number of features of a node; if given, data with another number is refused.
    """


class _BinaryAUROC(BinaryAUROC):
    """ROC-AUC of logits [samples, 2], so that it is updated like all other metrics."""

    def update(self, logits: Tensor, labels: Tensor) -> None:
        super().update(logits.softmax(dim=1)[:, 1], labels)
