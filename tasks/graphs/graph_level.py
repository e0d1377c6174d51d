"""LightningModules that predict a class, several labels or numbers of each graph."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from attnkit.lightning import UserError
from attnkit.lightning.protocols import Explained
from attnkit.tasks.graphs.module import LearnsClasses, LearnsValues, OfGraphs, beside


class WholeGraphs(OfGraphs):
    """Base class of all modules that predict whole graphs.

    A batch is one of `GraphsDataModule`. The model is given the nodes and edges of all its graphs
    and `batch`, the graph of each node, and returns a row for each graph. attnkit's models do so
    with `readout="graph"`; their global attention stays in each graph, without padding.
    """

    level = "graph"
    first_columns: tuple[str, ...] = ("graph", "name")

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if "batch" not in inspect.signature(self.model.forward).parameters:
            raise UserError(
                f"model: {type(self.model).__name__} takes no batch, the graph of each node; "
                "expected one that reads out graphs, such as model=graph_transformer"
            )

    def outputs(self, batch: Data) -> Tensor:
        """Return the model's outputs for each graph of a batch, [graphs, num_outputs].

        Raises:
            UserError: the model does not return a row for each graph.
        """
        given: dict[str, Any] = {**beside(self.model, batch), "batch": batch.batch}
        count = len(batch.ptr) - 1
        if "num_graphs" in inspect.signature(self.model.forward).parameters:
            given["num_graphs"] = count
        found = self(batch.x, batch.edge_index, **given)
        if list(found.shape) != [count, self.num_outputs]:
            raise UserError(
                f"model: expected a row for each graph, [{count}, {self.num_outputs}], got "
                f"{list(found.shape)}; attnkit's models do so with model.readout=graph"
            )
        return found

    def _of_stage(self, stage: str, batch: Data) -> tuple[Tensor, Tensor]:
        return self.outputs(batch), batch.y

    def test_step(self, batch: Data, batch_idx: int) -> None:
        self.evaluate("test", *self._of_stage("test", batch))

    def predict_step(self, batch: Data, batch_idx: int) -> dict[str, list[Any]]:
        """Return `graph` (numbers), `name` if graphs have names, and the columns of `classify`."""
        return self.named({"graph": batch.number.tolist(), **self.classify(batch)})

    @torch.no_grad()
    def classify(self, batch: Data) -> dict[str, list[Any]]:
        """Return columns of predictions with a value for each graph of a batch.

        For classes they are `label`, `probability` and, for up to 1,000 of them, `p(<class>)`; for
        labels `p(<label>)`; or each number by its name. See `columns` of `LearnsClasses` and
        `LearnsValues`.
        """
        return self.columns(self.outputs(batch))


class GraphClassification(LearnsClasses, WholeGraphs):
    """Predicts one class per graph: cross-entropy, accuracy and what `ClassificationModule` logs.

    Args:
        model: (x [nodes, in_channels], edge_index [2, edges], batch [nodes]) to logits [graphs,
            num_classes]; may take `edge_attr`, `edge_weight` and `num_graphs`; a module, or its
            configuration (see `TaskModule`).
        optimizer, scheduler, finetune: see `TaskModule`.
        num_classes: at least 2.
        class_names: for tables; "0", "1", … unless given.
        in_channels: number of features of a node; if given, data with another number is refused.
        class_weights: see `ClassificationModule`.
    """

    def explained(self, batch: Data) -> Explained:
        """Return the inputs of `attnkit.explain`: each graph of a batch by itself."""
        inputs = []
        for graph, start in enumerate(batch.ptr[:-1].tolist()):
            edges = batch.batch[batch.edge_index[0]] == graph
            given = {"x": batch.x[batch.batch == graph]}
            given["edge_index"] = batch.edge_index[:, edges] - start
            given |= {name: batch[name][edges] for name in beside(self.model, batch)}
            inputs.append({**given, "batch": torch.zeros_like(batch.batch[batch.batch == graph])})
        return Explained(
            self.model,
            inputs,
            class_names=self.class_names,
            truth=batch.y,
            graphs=batch.number.tolist(),
        )


class GraphValues(LearnsValues, WholeGraphs):
    """Predicts several labels or numbers of each graph: see `ValuesModule`.

    Args:
        model: as for `GraphClassification`, with output [graphs, num_outputs].
        optimizer, scheduler, finetune: see `TaskModule`.
        target: "labels" or "numbers".
        num_outputs: number of labels or numbers of a graph.
        class_names: names of the outputs, for tables; "0", "1", … unless given.
        in_channels: number of features of a node; if given, data with another number is refused.
    """
