"""The base LightningModule of attnkit's tasks and of users' own."""

import inspect
import io
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.core.mixins import HyperparametersMixin
from lightning.pytorch.utilities.parsing import collect_init_args
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from attnkit.finetune.methods import finetuned
from attnkit.lightning.build import build
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.modules.checks import NetworkAsBuilt, RatesAreHeeded, shapes_of
from attnkit.lightning.modules.optim import parameter_groups, scale_learning_rates, warmup_cosine
from attnkit.lightning.resume.checkpoints import load

if TYPE_CHECKING:
    from attnkit.lightning.export import Program


class TaskModule(LightningModule):
    """A model, its optimizer and its schedule; subclasses define `training_step` and the rest.

    An argument of the subclass's own constructor becomes a hyper-parameter only if it is plain
    (dict, list, str, number, bool, None), so that checkpoints always load with `weights_only=True`.
    With `model` given as a configuration, `load_from_checkpoint(path)` alone builds the module
    again; a model given as an object has to be passed again, as usual with Lightning, and so has a
    callable optimizer or scheduler if training is to continue.

    A module remembers, also in checkpoints, a key of each item that it was trained on, so that a
    test of it can leave them out: those that the method `training_keys()` of the data module
    returns for the train and val splits, int64 [items]. They accumulate if a training continues or
    starts from the weights of another.

    Args:
        model: the network, or its configuration (`{"_target_": "attnkit.ViT", …}`).
        optimizer: a callable of parameter groups (`functools.partial(torch.optim.SGD, lr=0.1)`), a
            configuration of one, or None: AdamW with learning rate 1e-3 and weight decay 0.05.
            Norms, biases and the model's `no_weight_decay()` are never decayed.
        scheduler: a callable of the optimizer, a configuration of one, or None: `warmup_cosine`.
            It is stepped after every optimizer step, `Plateau` after every epoch; if it takes
            `total_steps` or `steps_per_epoch`, it is given the number of optimizer steps in the run
            or in an epoch.
        finetune: selects what is trained of the model: a function that is called with it
            (`functools.partial(attnkit.finetune.lora, rank=8)`), a configuration of one, or None:
            everything. A checkpoint holds the whole model, and rebuilds it by the configuration.

    Attributes:
        trained_on: the keys, sorted; None: no training, or none with keys.
        has_unknown: whether a part of its training is unknown, as with data without
            `training_keys()`, or with weights from a file without keys. Known keys stay.

    Examples:
        >>> class Classifier(TaskModule):
        ...     def __init__(self, model, num_classes: int, **kwargs):
        ...         super().__init__(model, **kwargs)
        ...     def training_step(self, batch, batch_idx):
        ...         images, labels = batch
        ...         return cross_entropy(self.model(images), labels)
    """

    trained_on: Tensor | None = None
    has_unknown: bool = False

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        optimizer: Callable[..., Optimizer] | Mapping[str, Any] | None = None,
        scheduler: Callable[..., LRScheduler] | Mapping[str, Any] | None = None,
        finetune: Callable[[nn.Module], Any] | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._save_plain_hyperparameters(sys._getframe())

        # The user's own package needs no permission: a class of it is running already.
        self._own_package = type(self).__module__.partition(".")[0]
        if is_configured := isinstance(model, Mapping):
            model = self._build(model, "model")
        if not isinstance(model, nn.Module):
            raise TypeError(
                "model: expected an nn.Module or a mapping with _target_, "
                f"got {type(model).__name__}"
            )
        self.model = self._finetuned(model, finetune)
        self._built = shapes_of(self.model) if is_configured else None
        self._optimizer = self._factory(optimizer, "optimizer")
        self._scheduler = self._factory(scheduler, "scheduler")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        optimizer = self._make_optimizer()
        scheduler = self.make_scheduler(optimizer)
        when: dict[str, Any] = {"interval": "step"}
        if isinstance(scheduler, ReduceLROnPlateau):
            if not hasattr(scheduler, "monitor"):
                raise UserError(
                    "scheduler: ReduceLROnPlateau does not say which metric it follows; "
                    "attnkit.lightning.Plateau has an argument monitor"
                )
            when = {"interval": "epoch", "monitor": scheduler.monitor}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **when}}

    def configure_callbacks(self) -> list[Callback]:
        """Return the module's own callbacks: `CachedFeatures` if its head alone is trained, and
        checks that the network is the one that its configuration builds, and that a user's own
        optimizer uses the learning rates of fine-tuning. They take part in training only."""
        if not self.trainer.training:  # or Lightning reports that a test replaces them
            return []
        found = finetuned(self)
        callbacks: list[Callback] = []
        if self._built is not None:
            callbacks.append(NetworkAsBuilt(self._built))
        if found and found[2].options.get("cache"):
            from attnkit.lightning.callbacks.cached_features import CachedFeatures

            callbacks.append(CachedFeatures())
        if type(self).configure_optimizers is not TaskModule.configure_optimizers:
            callbacks.append(RatesAreHeeded())
        return callbacks

    def on_train_start(self) -> None:
        keys_of_data = getattr(getattr(self.trainer, "datamodule", None), "training_keys", None)
        if keys_of_data is None:
            self.has_unknown = True
            return
        before = () if self.trained_on is None else (self.trained_on,)
        self.trained_on = torch.cat([*before, keys_of_data()]).unique()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trained_on is not None:
            checkpoint["trained_on"] = self.trained_on
        checkpoint["has_unknown_training"] = self.has_unknown

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.trained_on, self.has_unknown = training_of(checkpoint)

    def programs(self) -> dict[str, "Program"]:
        """Return the exported programs that `Export` writes, by name; subclasses override it."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Return what else users of the programs need, as plain data: classes, words, …"""
        return {}

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: Any, *, weights_only: bool | None = True, **kwargs: Any
    ) -> Any:
        """Load an intact file as Lightning's `load_from_checkpoint` does, weights only.

        No code in the file is run. The classes that its hyper-parameters name are checked as in
        any configuration.

        Raises:
            CheckpointError: the file is a URL, missing, damaged, or holds code.
            UserError: `weights_only=False`; the file names a class that may not be built; or
                arguments that were objects in training are missing and must be passed again.
        """
        if weights_only is False:
            raise UserError("weights_only=False would run code that the file holds")
        name = "the checkpoint"
        if not isinstance(checkpoint_path, io.IOBase):
            name = os.fspath(checkpoint_path)
            load(name, mmap=True)
        try:
            return super().load_from_checkpoint(
                checkpoint_path, weights_only=weights_only, **{"_instantiator": None, **kwargs}
            )
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        except TypeError as error:
            if isinstance(checkpoint_path, io.IOBase):
                checkpoint_path.seek(0)
            held = torch.load(checkpoint_path, "cpu", weights_only=True).get("hyper_parameters")
            missing = [
                name for name in required_arguments(cls) if name not in {*(held or {}), *kwargs}
            ]
            if not missing:
                raise
            again = ", ".join(f"{name}=…" for name in missing)
            raise UserError(
                f"{name} does not hold {', '.join(missing)}: "
                f"given as an object in training, not as a configuration\n"
                f"pass it again: {cls.__name__}.load_from_checkpoint(path, {again})"
            ) from error

    def _save_plain_hyperparameters(self, frame: FrameType) -> None:
        # Lightning finds the arguments of every subclass's __init__ by walking up from this frame.
        given: dict[str, Any] = {}
        for arguments in collect_init_args(frame, [], classes=(HyperparametersMixin,)):
            given.update(arguments)
        if given.get("finetune") is None:  # not every subclass has it
            given.pop("finetune", None)
        plain = {name: untrained(_plain(value)) for name, value in given.items()}
        objects = [name for name, value in plain.items() if value is _NOT_PLAIN]
        objects += [] if "finetune" in plain else ["finetune"]
        self.save_hyperparameters(ignore=objects, frame=frame, logger=False)
        self.hparams.update({name: plain[name] for name in self.hparams})

    def _build(self, node: Mapping[str, Any], at: str) -> Any:
        return build(node, allow=(self._own_package,), at=at)

    def _factory(self, given: Any, at: str) -> Callable[..., Any] | None:
        """Return the callable of an optimizer or scheduler; built now, so errors come at once."""
        if isinstance(given, Mapping):
            if "_target_" not in given:
                raise UserError(f"{at}: expected a _target_, got the keys {', '.join(given)}")
            return self._build({**given, "_partial_": True}, at)
        if given is not None and not callable(given):
            raise TypeError(f"{at}: expected a callable, a mapping or None, got {given!r}")
        return given

    def _finetuned(self, model: nn.Module, finetune: Any) -> nn.Module:
        make = self._factory(finetune, "finetune")
        if make is None:
            return model
        # Frozen parts are in evaluation mode on purpose.
        warnings.filterwarnings("ignore", r"Found \d+ module\(s\) in eval mode at the start")
        try:
            found = make(model)
        except UserError:
            raise
        except (TypeError, ValueError) as error:
            raise UserError(f"finetune.{first_line(error)}") from error
        return found if isinstance(found, nn.Module) else model

    def _make_optimizer(self) -> Optimizer:
        groups = parameter_groups(self)
        if not groups:
            raise UserError("optimizer: the module has no parameter that requires a gradient")
        if self._optimizer is None:
            return scale_learning_rates(AdamW(groups, lr=1e-3, weight_decay=0.05))
        return scale_learning_rates(_called(self._optimizer, "optimizer", groups))

    def make_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Return the schedule of an optimizer for the number of steps that the trainer has now."""
        make = self._scheduler or warmup_cosine
        arguments = {}
        parameters = inspect.signature(make).parameters
        bound = getattr(make, "keywords", {})
        wanted = [
            name
            for name in ("total_steps", "steps_per_epoch")
            if name in parameters and bound.get(name) is None
        ]
        if wanted:
            try:
                total_steps = self.trainer.estimated_stepping_batches
            except UserError:  # an error of the data, which are loaded here
                raise
            except ValueError as error:
                raise UserError(f"trainer: {str(error).partition('. ')[0]}") from error
            if math.isinf(total_steps):
                raise UserError(
                    "scheduler: it needs the number of steps; set trainer.max_epochs or max_steps"
                )
            if total_steps < 1:
                raise UserError("data: no training batches: nothing to train on")
            batches = self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
            known = {
                "total_steps": int(total_steps),
                "steps_per_epoch": None if math.isinf(batches) else math.ceil(batches),
            }
            arguments = {name: known[name] for name in wanted}
        return _called(make, "scheduler", optimizer, **arguments)


def required_arguments(cls: type) -> list[str]:
    """Return the arguments without a default of a class and of the bases given its `**kwargs`."""
    required: dict[str, None] = {}
    for init in (vars(each)["__init__"] for each in cls.__mro__ if "__init__" in vars(each)):
        _, *arguments = inspect.signature(init).parameters.values()
        handed_on = [a for a in arguments if a.kind is a.VAR_KEYWORD]
        rest = [a for a in arguments if a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]
        required |= dict.fromkeys(a.name for a in rest if a.default is a.empty)
        if not handed_on:
            break
    return list(required)


def _called(make: Callable[..., Any], at: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return make(*args, **kwargs)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        name = getattr(getattr(make, "func", make), "__qualname__", repr(make))
        raise UserError(f"{at}: {name}: {first_line(error)}") from error


def untrained(node: Any) -> Any:
    """Return a configuration without pretrained weights, into which a checkpoint is loaded.

    Otherwise they would be read or downloaded again, only to be overwritten, and could be gone.
    """
    if isinstance(node, list):
        return [untrained(value) for value in node]
    if not isinstance(node, Mapping):
        return node
    plain = {key: untrained(value) for key, value in node.items()}
    if "_target_" in plain and plain.get("pretrained"):
        plain["pretrained"] = None if isinstance(plain["pretrained"], str) else False
    if "_target_" in plain and isinstance(plain.get("weights"), str):
        plain["weights"] = None
    return plain


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    """Return `value` as plain data (a path as a string), or `_NOT_PLAIN` if that is impossible."""
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        items = {key: _plain(item) for key, item in value.items()}
        return _NOT_PLAIN if any(item is _NOT_PLAIN for item in items.values()) else items
    if isinstance(value, (list, tuple)):
        values = [_plain(item) for item in value]
        return _NOT_PLAIN if any(item is _NOT_PLAIN for item in values) else values
    return _NOT_PLAIN


def training_of(checkpoint: Mapping[str, Any]) -> tuple[Tensor | None, bool]:
    """Return `trained_on` and `has_unknown` of a checkpoint; without keys, it is unknown."""
    keys = checkpoint.get("trained_on")
    return keys, checkpoint.get("has_unknown_training", False) or keys is None


def was_trained_on(module: Any, keys: Tensor) -> Tensor | None:
    """Return which of the items with these keys a module was trained on, bool; None: unknown."""
    known = getattr(module, "trained_on", None)
    return None if known is None else torch.isin(keys, known)


def unknown_part(module: Any) -> str:
    """Return an addition to a line on a test if keys are known, but not those of all trainings."""
    has = getattr(module, "has_unknown", False)
    return "; what else the module was trained on is not known" if has else ""
