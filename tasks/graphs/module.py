"""Base classes of the modules of nodes and of whole graphs."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from attnkit.layers.graph.attention import GraphAttention
from attnkit.lightning import ClassificationModule, UserError
from attnkit.lightning.export import Program
from attnkit.lightning.modules.classification import ClassWeights, probability_columns
from attnkit.lightning.modules.module import TaskModule
from attnkit.lightning.modules.values import ValuesModule
from attnkit.models.sgformer import GraphConvolution
from attnkit.tasks.graphs.base import CARRIED


class OfGraphs(TaskModule):
    """Base class of all modules of graphs, which checks the data and defines the export.

    It is the second base of a module. The first base, `LearnsClasses` or `LearnsValues`, defines
    the kind of target; subclasses of this one define whether nodes or graphs have it.
    """

    level: str
    """What the module predicts, as in `level` of the data: "node" or "graph"."""
    first_columns: tuple[str, ...]
    """Names that predictions.csv may have before the columns of the outputs."""
    in_channels: int | None
    num_outputs: int
    # attributes of the first base
    targets: tuple[str, ...]
    """Values of the data's `target` that the module can learn."""
    loss: Callable[[Tensor, Tensor], Tensor]
    columns: Callable[[Tensor], dict[str, list[Any]]]
    evaluate: Callable[[str, Tensor, Tensor], None]
    meaning: Callable[[], str]

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = getattr(self.trainer, "datamodule", None)
        check_channels(self, data)
        target = getattr(data, "target", None)
        if target is not None and target not in self.targets:
            raise UserError(
                f"data.target={target}: {type(self).__name__} learns {' or '.join(self.targets)}; "
                f"level={self.level}{'' if target == 'classes' else '_values'} learns {target}"
            )
        check_readout(self.model, self.level)
        for name in ("graph", "graphs"):
            if hasattr(graphs := getattr(data, name, None), "edge_index"):
                check_edges(self.model, graphs)

    def _of_stage(self, stage: str, batch: Data) -> tuple[Tensor, Tensor]:
        """Return outputs and truth of the nodes or graphs that count in a batch of a stage.

        The stage is "train", "val" or "test".
        """
        raise NotImplementedError

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        return self.loss(*self._of_stage("train", batch))

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self.evaluate("val", *self._of_stage("val", batch))

    def named(self, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Return columns of predictions with a column `name` behind the first one.

        The first column, `node` or `graph`, holds numbers. The names are `node_names` or
        `graph_names` of the data module; without these the columns stay as they are.
        """
        first, numbers = next(iter(columns.items()))
        names = getattr(getattr(self.trainer, "datamodule", None), f"{first}_names", None)
        if not names:
            return columns
        return {first: numbers, "name": [names[number] for number in numbers], **columns}

    def programs(self) -> dict[str, Program]:
        """Return the program `model`, from features and edges of one graph to outputs.

        The graph has any size; the outputs are those of its nodes, or of the graph. There is no
        program if `in_channels` is unknown or the model reads positions or edge features.
        """
        if self.in_channels is None or any(
            getattr(self.model, name, None) is not None for name in ("position_dim", "edge_dim")
        ):
            return {}
        channels, of_nodes = self.in_channels, self.level == "node"
        output = "logits" if of_nodes and "classes" in self.targets else "outputs"
        return {
            "model": Program(
                self,
                lambda nodes, edges: {
                    "x": torch.randn(nodes, channels),
                    "edge_index": torch.randint(0, nodes, (2, edges)),
                },
                {"x": ("nodes", channels), "edge_index": (2, "edges")},
                (output, ("nodes" if of_nodes else 1, self.num_outputs)),
                {
                    "x": "features of the nodes of one graph, dense",
                    "edge_index": "source nodes in row 0, target nodes in row 1; not checked",
                    output: self.meaning(),
                },
            )
        }


def check_readout(model: nn.Module, *expected: str) -> None:
    """Raise a `UserError` if the model's readout is not one of the expected ones."""
    readout = getattr(model, "readout", expected[0])
    if readout not in expected:
        raise UserError(f"model.readout: expected {' or '.join(expected)}, got {readout}")


def check_edges(model: nn.Module, graph: Any) -> None:
    """Warn of attributes of edges that the model does not read.

    Raises:
        UserError: the model reads edge features, and the data has none, or of another width.
    """
    carried = [name for name in CARRIED if getattr(graph, name, None) is not None]
    if unread := [name for name in carried if name not in read_of_edges(model)]:
        rank_zero_warn(
            f"data: {' and '.join(unread)} of the edges: not used, since "
            f"{type(model).__name__} does not read such attributes"
        )
    read = getattr(model, "edge_dim", None)
    given = graph.edge_attr.shape[1] if "edge_attr" in carried else None
    if read not in (None, given):
        raise UserError(
            f"data: expected edge_attr [edges, {read}], which the model reads (model.edge_dim),"
            f" got {'none' if given is None else f'[edges, {given}]'}"
        )


def beside(model: nn.Module, batch: Data) -> dict[str, Tensor]:
    """Return the model's arguments beyond features and edges: positions and edge attributes."""
    carries = any(name in batch for name in CARRIED)
    names = ("positions", *(read_of_edges(model) if carries else ()))
    return {name: batch[name] for name in names if name in batch}


def check_channels(module: Any, data: Any) -> None:
    """Raise a `UserError` if data and module differ in the number of features, or in the level."""
    given = getattr(data, "in_channels", None)
    if None not in (given, module.in_channels) and given != module.in_channels:
        raise UserError(
            f"data: its nodes have {given} features, but the module was made for "
            f"{module.in_channels}"
        )
    level = getattr(data, "level", module.level)
    if level != module.level:
        what = {
            "node": "the prediction of its nodes",
            "link": "the prediction of its edges",
            "graph": "the prediction of many graphs",
        }[level]
        hint = "; data.level=node learns the nodes of each" if level == "graph" else ""
        raise UserError(
            f"data: {type(data).__name__} is for level={level}, {what}; "
            f"{type(module).__name__} is for level={module.level}{hint}"
        )


def read_of_edges(model: nn.Module) -> list[str]:
    """Return which attributes of edges a model reads: those that are arguments of its `forward`.

    PyG's models have these arguments even if their layers do not read them: `supports_edge_attr`
    is then False, and layers with `edge_dim=None` read no `edge_attr`.
    """
    parameters = inspect.signature(model.forward).parameters
    sized = next((module for module in model.modules() if hasattr(module, "edge_dim")), None)
    unread = "edge_attr" if sized is not None and sized.edge_dim is None else ""
    names = [name for name in CARRIED if name in parameters and name != unread]
    return [name for name in names if getattr(model, f"supports_{name}", True)]


def num_layers(model: nn.Module) -> int:
    """Return the number of layers of a model that gather along edges; 0 if none is known."""
    known = getattr(model, "num_hops", None) or getattr(model, "num_layers", None)
    layers = (GraphAttention, GraphConvolution, MessagePassing)
    return known or sum(isinstance(module, layers) for module in model.modules())


class LearnsClasses(ClassificationModule):
    """Base of modules that predict one class of each node or graph (see `OfGraphs`).

    The arguments are those of `NodeClassification`.
    """

    targets: tuple[str, ...] = ("classes",)

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

    def loss(self, outputs: Tensor, truth: Tensor) -> Tensor:
        """Return and log the training loss of a batch; 0 for a batch without known classes."""
        losses = functional.cross_entropy(
            outputs.float(), truth, self.class_weights, reduction="none"
        )
        plain = None
        if self.class_weights is not None:
            plain = functional.cross_entropy(outputs.detach().float(), truth, reduction="none")
        self.log_train_loss(losses, plain)
        return losses.mean() if len(losses) else losses.sum()

    def columns(self, outputs: Tensor) -> dict[str, list[Any]]:
        """Return columns of predictions, with a value for each row of logits.

        They are `label`, the name of the most probable class, its `probability`, and for up to
        1,000 classes `p(<class>)`, the probability of each.
        """
        probabilities = outputs.float().softmax(dim=1)
        probability, label = probabilities.max(dim=1)
        return {
            "label": [self.class_names[number] for number in label.tolist()],
            "probability": probability.tolist(),
            **probability_columns(self.class_names, probabilities),
        }

    def in_units(self, outputs: Tensor) -> Tensor:
        """Return the outputs themselves, because logits have no units."""
        return outputs

    def facts(self) -> dict[str, Any]:
        return {"classes": self.class_names}

    def meaning(self) -> str:
        """Describe the outputs of an exported program."""
        return "logits of the classes: softmax makes probabilities of them"


class LearnsValues(ValuesModule):
    """Base of modules that predict several labels or numbers of each node or graph.

    See `ValuesModule` for the metrics, and `OfGraphs` for the second base class. The arguments are
    those of `NodeValues`.
    """

    targets: tuple[str, ...]

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

    def facts(self) -> dict[str, Any]:
        return {self.target: self.class_names}
