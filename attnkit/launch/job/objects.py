"""The objects of a run, from its configuration: data, module and trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, WeightAveraging
from lightning.pytorch.loggers import Logger
from torch import nn

from attnkit.launch.config import schema
from attnkit.launch.job.kinds import Kind
from attnkit.launch.signals import raise_received
from attnkit.lightning._private import replace_signal_handling, set_timeout
from attnkit.lightning.build.build import build
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.modules.module import TaskModule, untrained
from attnkit.lightning.resume import checkpoints

LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
_HOOKS = {
    "fit": (
        *("on_fit_", "on_train_", "on_validation_", "on_sanity_", "on_before_"),
        *("on_after_backward", "on_save_checkpoint", "on_test_"),  # a training ends with a test
    ),
    "test": ("on_test_",),
    "predict": ("on_predict_", "write_on_"),
}


# --- data -----------------------------------------------------------------------------------------


def make_data(config: Mapping[str, Any]) -> LightningDataModule:
    """The data module that `data` describes."""
    data = build(config["data"], at="data")
    if not isinstance(data, LightningDataModule):
        raise UserError(f"data: {config['data']['_target_']} is no LightningDataModule")
    return data


def make_predict_data(config: Mapping[str, Any], module: LightningModule) -> LightningDataModule:
    """That of `predict`, whose nulls are what the trained module says of itself; else `data`."""
    node = config["predict"]
    if node is not None:
        facts = {k: getattr(module, k, None) for k, v in node.items() if v is None}
        return build({**node, **facts}, at="predict", images=config["images"])
    data = make_data(config)
    if type(data).predict_dataloader is LightningDataModule.predict_dataloader:
        target = config["data"]["_target_"]
        raise UserError(f"run=predict: {target} has no predict_dataloader")
    return data


def fill_from_data(config: Mapping[str, Any], data: LightningDataModule) -> None:
    """Set nulls whose names the data module describes: image_size, num_classes, …"""
    describe = getattr(data, "describe", None)
    nodes = [config.get(key) or {} for key in schema.FILLED]
    if describe is None or all(v is not None for node in nodes for v in node.values()):
        return
    data.prepare_data()
    data.setup("fit")
    facts = {k: list(v) if isinstance(v, tuple) else v for k, v in describe().items()}
    for node in nodes:
        node.update({k: facts[k] for k, v in node.items() if v is None and k in facts})


# --- module ---------------------------------------------------------------------------------------


def make_module(config: Mapping[str, Any], *, pretrained: bool = True) -> LightningModule:
    """The module, with those of model, optimizer and scheduler that the configuration has.

    Args:
        pretrained: False where a checkpoint's weights come next.
    """
    node = config["module"]
    make = build({**node, "_partial_": True}, at="module")
    parts = {key: config[key] for key in schema.PARTS if config.get(key)}
    if "model" in parts:
        inner = {key: config[key] for key in schema.MODEL_PARTS if config.get(key)}
        parts["model"] = {**parts["model"], **inner}
        if not pretrained:
            parts["model"] = untrained(parts["model"])
    # attnkit's modules build their parts themselves, so that a checkpoint knows how; others get
    # objects.
    if not (isinstance(make.func, type) and issubclass(make.func, TaskModule)):
        parts = {
            key: build(part if key == "model" else {**part, "_partial_": True}, at=key)
            for key, part in parts.items()
        }
    try:
        module = make(**parts)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"module: {node['_target_']}: {first_line(error)}") from error
    if not isinstance(module, LightningModule):
        raise UserError(f"module: {node['_target_']} is no LightningModule")
    return module


def load_module(config: Mapping[str, Any]) -> LightningModule:
    """The module a checkpoint holds, built as it was saved."""
    ckpt = config["ckpt"]
    cls = build({"_target_": config["module"]["_target_"], "_partial_": True}, at="module").func
    load = partial(cls.load_from_checkpoint, map_location="cpu", weights_only=True)
    _check_is_of(cls, ckpt, config["task"])
    wrong = (AttributeError, LookupError, TypeError, ValueError)
    return loaded(partial(load, ckpt), ckpt, wrong)


def _check_is_of(cls: type[LightningModule], ckpt: str, task: str) -> None:
    """Whether a checkpoint's hyper-parameters are this class's, as far as names tell."""
    held = checkpoints.load(ckpt, mmap=True).get("hyper_parameters", {})
    parameters = inspect.signature(cls).parameters
    if not held or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    said = [f"has no {name}" for name in held if name not in parameters]
    said += [
        f"needs {name}, which the checkpoint does not hold"
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in held
    ]
    if said:
        raise UserError(
            f"ckpt: {ckpt} is no checkpoint of task={task}: {cls.__name__} {said[0]}\n"
            "  give the task it was trained with, task=…; in its run folder it needs none"
        )


def compile_model(module: LightningModule, mode: bool | str) -> None:
    """torch.compile in place, so that the names in checkpoints stay."""
    if mode:
        model = getattr(module, "model", None)
        target = model if isinstance(model, nn.Module) else module
        target.compile(mode="default" if mode is True else mode)


def loaded(
    load: Callable[[], Any], ckpt: object, wrong: tuple[type[Exception], ...] = (KeyError,)
) -> Any:
    """Call what loads a checkpoint; that it does not fit is a `UserError`.

    Args:
        wrong: what else it raises at a checkpoint of another kind.
    """
    try:
        return load()
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
        raise UserError(f"ckpt: {ckpt} does not fit the model\n  {lines[0][:300]}") from error
    except wrong as error:
        problem = f"{first_line(error, named=True)}"
        raise UserError(f"ckpt: {ckpt} is no checkpoint of this task: {problem}") from error


# --- trainer --------------------------------------------------------------------------------------


def make_trainer(config: Mapping[str, Any], kind: Kind, asked: Collection[str] = ()) -> Trainer:
    """What `trainer`, `callbacks` and `logger` describe, as far as this kind of run uses them.

    Args:
        asked: names of callbacks that were asked for on the command line; one that takes no part in
            this kind of run is refused.

    Raises:
        UserError: one of them is wrong.
    """
    if "trainer" not in kind.uses:
        return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    arguments = dict(config.get("trainer") or {})
    arguments.pop("oom_retry", None)
    timeout = arguments.pop("timeout_seconds", None)
    if timeout is not None and (type(timeout) not in (int, float) or timeout <= 0):
        raise UserError(f"trainer.timeout_seconds: expected seconds above 0, got {timeout!r}")
    limit = arguments.pop("limit_batches", None)
    if limit is not None:
        arguments = {**dict.fromkeys(LIMITS, limit), **arguments}
    named = _built(Callback, "callbacks", config.get("callbacks"))
    idle = [name for name, callback in named.items() if not takes_part(type(callback), kind.stage)]
    for name in (name for name in idle if name in asked):
        target = config["callbacks"][name]["_target_"]
        reason = f": it has no hook of {kind.stage}" if kind.stage else ""
        raise UserError(f"callbacks.{name}: {target} does nothing in run={kind.name}{reason}")
    callbacks = [callback for name, callback in named.items() if name not in idle]
    if "inspect" in kind.uses:
        callbacks += _built(Callback, "", {"inspect": config["inspect"]}).values()
    loggers = _built(Logger, "logger", config["logger"] if "logger" in kind.uses else {})
    try:
        trainer = Trainer(
            **arguments,
            callbacks=callbacks,
            logger=list(loggers.values()) or False,
            precision=config["precision"],
            default_root_dir=str(Path(config["run_dir"])),
            enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
            enable_progress_bar="progress" in named and "progress" not in idle,
        )
    except Exception as error:  # Lightning's of all kinds, all about these arguments
        raise UserError(f"trainer: {first_line(error)}") from error
    if timeout is not None:
        set_timeout(trainer, timedelta(seconds=timeout))
    # Lightning's answer to SIGTERM is a broadcast inside the handler and exit code 0; ours
    # are the callback SaveOnSignal in fit, and launch/signals.py.
    replace_signal_handling(trainer, raise_received)
    return trainer


def takes_part(callback: type[Callback], stage: str) -> bool:
    """Whether a callback does anything in a stage, by the hooks that it and its bases write.

    One without a hook of any stage (it has `setup`, say), and one that reads checkpoints, takes
    part in all. Where there is no stage, as in a benchmark, only averages of weights do.
    """
    if not stage:
        return issubclass(callback, WeightAveraging)
    written = {name for cls in callback.__mro__ if cls not in _PLAIN for name in vars(cls)}
    if "on_load_checkpoint" in written or any(n.startswith(_HOOKS[stage]) for n in written):
        return True
    return not any(n.startswith(hooks) for hooks in _HOOKS.values() for n in written)


_PLAIN = (Callback, *Callback.__mro__)


def _built(kind: type, at: str, nodes: Mapping[str, Any] | None) -> dict[str, Any]:
    """The objects of a collection, each of the kind that belongs there."""
    built = {}
    for name, node in (nodes or {}).items():
        if node:
            key = f"{at}.{name}".lstrip(".")
            built[name] = build(node, at=key)
            if not isinstance(built[name], kind):
                raise UserError(f"{key}: {node['_target_']} is no {kind.__name__}")
    return built
