"""Base classes of modules that predict a class, labels or numbers of each node or graph."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from attnkit.lightning import ClassificationModule
from attnkit.lightning.modules.classification import ClassWeights, probability_columns
from attnkit.lightning.modules.values import ValuesModule


class LearnsClasses(ClassificationModule):
    """Base of modules that predict one class of each node or graph (see `OfGraphs`).

    Args:
        model: a module, or its configuration (see `TaskModule`); the other base class describes its
            inputs and outputs.
        optimizer, scheduler, finetune: see `TaskModule`.
        num_classes: at least 2.
        class_names: for tables; "0", "1", … unless given.
        in_channels: number of features of a node; if given, data with another number is refused.
        class_weights: see `ClassificationModule`.
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

    See `ValuesModule` for the metrics, and `OfGraphs` for the second base class.

    Args:
        model: a module, or its configuration (see `TaskModule`); the other base class describes its
            inputs and outputs.
        optimizer, scheduler, finetune: see `TaskModule`.
        target: "labels" or "numbers".
        num_outputs: number of labels or numbers of a node or graph.
        class_names: names of the outputs, for tables; "0", "1", … unless given.
        in_channels: number of features of a node; if given, data with another number is refused.
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
