"""The LightningModules of whole graphs: a class, several labels or numbers of each."""

import inspect
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch_geometric.data import Data

from attnkit.lightning import ClassificationModule, UserError
from attnkit.lightning.export.program import Program
from attnkit.lightning.modules.classification import ClassWeights, probability_columns
from attnkit.lightning.modules.module import TaskModule
from attnkit.lightning.modules.values import ValuesModule
from attnkit.lightning.protocols import Explained
from attnkit.tasks.graphs.module import beside, check_channels, check_edges


class WholeGraphs(TaskModule):
    """What all modules of whole graphs do, whatever is learned of a graph.

    A batch is one of `GraphsDataModule`. The model is given the nodes and edges of all its graphs,
    `batch`, the graph of each node, and returns a row for each graph: with attnkit's models
    `readout="graph"`, whose global attention stays in each graph, without padding.
    """

    level = "graph"
    targets: tuple[str, ...]
    """Which `target` of the data it learns."""
    in_channels: int | None
    num_outputs: int
    # of the other base of a subclass, which knows what is learned
    losses: Callable[[Tensor, Tensor], Tensor]
    log_train_loss: Callable[..., None]
    evaluate: Callable[[str, Tensor, Tensor], None]

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = getattr(self.trainer, "datamodule", None)
        check_channels(self, data)
        target = getattr(data, "target", None)
        if target is not None and target not in self.targets:
            other = "graph" if target == "classes" else "graph_values"
            raise UserError(
                f"data.target={target}: {type(self).__name__} learns {' or '.join(self.targets)}; "
                f"level={other} learns {target}"
            )
        if "batch" not in inspect.signature(self.model.forward).parameters:
            raise UserError(
                f"model: {type(self.model).__name__} takes no batch, the graph of each node; "
                "expected one that reads out graphs, such as model=graph_transformer"
            )
        if (graphs := getattr(data, "graphs", None)) is not None:
            check_edges(self.model, graphs)

    def outputs(self, batch: Data) -> Tensor:
        """What the model says of each graph of a batch, [graphs, num_outputs].

        Raises:
            UserError: it does not return a row for each graph.
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

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        losses = self.losses(self.outputs(batch), batch.y)
        self.log_train_loss(losses)
        return losses.sum() / max(1, losses.numel())  # of a batch without known values 0

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self.evaluate("val", self.outputs(batch), batch.y)

    def test_step(self, batch: Data, batch_idx: int) -> None:
        self.evaluate("test", self.outputs(batch), batch.y)

    def predict_step(self, batch: Data, batch_idx: int) -> dict[str, list[Any]]:
        """The number of each graph, its `name`, if the data module has `graph_names`, and what
        `classify` says of it."""
        numbers = batch.number.tolist()
        names = getattr(getattr(self.trainer, "datamodule", None), "graph_names", None)
        named = {"name": [names[number] for number in numbers]} if names else {}
        return {"graph": numbers, **named, **self.classify(batch)}

    @abstractmethod
    def classify(self, batch: Data) -> dict[str, list[Any]]:
        """Columns of what is said of each graph of a batch."""

    def programs(self) -> dict[str, Program]:
        """`model`: features and edges of one graph of any size to its outputs; none where the model
        reads positions or edge features."""
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
                ("outputs", (1, self.num_outputs)),
                {
                    "x": "features of the nodes of one graph",
                    "edge_index": "source nodes in row 0, target nodes in row 1; not checked",
                    "outputs": self._meaning(),
                },
            )
        }

    @abstractmethod
    def _meaning(self) -> str:
        """What the outputs of the exported program are."""


class GraphClassification(WholeGraphs, ClassificationModule):
    """One class per graph: cross-entropy, accuracy and what `ClassificationModule` logs.

    Args:
        model: (x [nodes, in_channels], edge_index [2, edges], batch [nodes]) to logits [graphs,
            num_classes]; may take `edge_attr`, `edge_weight` and `num_graphs`; a module, or its
            configuration (see `TaskModule`).
        optimizer, scheduler, finetune: see `TaskModule`.
        num_classes: at least 2.
        class_names: for tables; "0", "1", … unless given.
        in_channels: features of a node; data with others is then refused.
        class_weights: see `ClassificationModule`.
    """

    targets = ("classes",)

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
        self.num_outputs = num_classes

    def losses(self, outputs: Tensor, truth: Tensor) -> Tensor:
        return functional.cross_entropy(
            outputs.float(), truth, self.class_weights, reduction="none"
        )

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        logits = self.outputs(batch)
        losses, plain = self.losses(logits, batch.y), None
        if self.class_weights is not None:
            plain = functional.cross_entropy(logits.detach().float(), batch.y, reduction="none")
        self.log_train_loss(losses, plain)
        return losses.mean()

    @torch.no_grad()
    def classify(self, batch: Data) -> dict[str, list[Any]]:
        """Of each graph `label`, the name of the most probable class, its `probability`, and of up
        to 1,000 classes `p(<class>)`, the probability of each."""
        probabilities = self.outputs(batch).float().softmax(dim=1)
        probability, label = probabilities.max(dim=1)
        return {
            "label": [self.class_names[number] for number in label.tolist()],
            "probability": probability.tolist(),
            **probability_columns(self.class_names, probabilities),
        }

    def explained(self, batch: Data) -> Explained:
        """What `attnkit.explain` is given of a batch: each graph by itself."""
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

    def facts(self) -> dict[str, Any]:
        return {"classes": self.class_names}

    def _meaning(self) -> str:
        return "logits of the classes: softmax makes probabilities of them"


class GraphValues(WholeGraphs, ValuesModule):
    """Several labels, or numbers, of each graph: see `ValuesModule`.

    Args:
        model: as of `GraphClassification`, to [graphs, num_outputs].
        optimizer, scheduler, finetune: see `TaskModule`.
        target: "labels" or "numbers".
        num_outputs: labels or numbers of a graph.
        class_names: of these, for tables; "0", "1", … unless given.
        in_channels: features of a node; data with others is then refused.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        optimizer: Callable[..., Optimizer] | Mapping[str, Any] | None = None,
        scheduler: Callable[..., LRScheduler] | Mapping[str, Any] | None = None,
        finetune: Callable[[nn.Module], Any] | Mapping[str, Any] | None = None,
        *,
        target: Literal["labels", "numbers"],
        num_outputs: int,
        class_names: Sequence[str] | None = None,
        in_channels: int | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            scheduler,
            finetune,
            target=target,
            num_outputs=num_outputs,
            class_names=class_names,
        )
        self.in_channels = in_channels
        self.targets = (target,)
        columns = ("graph", "name") if target == "numbers" else ()
        times = Counter([*self.class_names, *columns])
        if wrong := [name for name in times if times[name] > 1]:
            raise ValueError(
                "class_names: expected names that differ, also from the columns graph and name of "
                f"predictions.csv, got {wrong[0]!r}; rename it in the data"
            )

    @torch.no_grad()
    def classify(self, batch: Data) -> dict[str, list[Any]]:
        """Of each graph `p(<label>)`, the probability of each label, or, of more than 1,000 labels,
        `labels`, those above 0.5 with their probability; or each number by its name."""
        found = self.outputs(batch).float()
        if self.target == "labels":
            rows, names = found.sigmoid(), self.class_names
            likely = ((row > 0.5).nonzero().flatten().tolist() for row in rows)
            return probability_columns(names, rows) or {
                "labels": [
                    [(names[place], float(row[place])) for place in places]
                    for row, places in zip(rows.cpu(), likely, strict=True)
                ]
            }
        return dict(zip(self.class_names, found.T.tolist(), strict=True))

    def facts(self) -> dict[str, Any]:
        return {self.target: self.class_names}

    def _meaning(self) -> str:
        if self.target == "labels":
            return "logits of the labels: the logistic function makes probabilities of them"
        return "numbers, in the units of the data"
