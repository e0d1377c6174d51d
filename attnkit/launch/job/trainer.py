"""The Trainer of a run, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger

from attnkit.launch.config import schema
from attnkit.launch.measure import bench
from attnkit.launch.signals import raise_received
from attnkit.lightning.build.build import build
from attnkit.lightning.errors import UserError, first_line

_TRAINING_ONLY = (
    "EarlyStopping",
    "ExactAccumulation",
    "ExactResume",
    "FiniteLoss",
    "LearningCurves",
    "ModelCheckpoint",
    "Pruning",
    "SaveOnSignal",
)
LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")


def make_trainer(config: Mapping[str, Any], folder: Path) -> Trainer:
    """What `trainer`, `callbacks` and `logger` say, of them what this kind of run has a use for.

    Raises:
        UserError: one of them is wrong.
    """
    if config["run"] == "export":  # which none takes part in
        return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    arguments = dict(config.get("trainer") or {})
    timeout = arguments.pop("timeout_seconds", None)
    if timeout is not None and (type(timeout) not in (int, float) or timeout <= 0):
        raise UserError(f"trainer.timeout_seconds: expected seconds above 0, got {timeout!r}")
    arguments.pop("oom_retry", None)
    limit = arguments.pop("limit_batches", None)
    if limit is not None:
        arguments = {**dict.fromkeys(LIMITS, limit), **arguments}
    named = config.get("callbacks") or {}
    if config["run"] != "train":
        named = {k: v for k, v in named.items() if not _only_for_training(v)}
    if config["run"] in schema.PREDICTING:
        # One progress bar: the rest of them has figures to write.
        named = {k: v for k, v in named.items() if k in ("progress", "ema", "safe")}
    if config["run"] == "bench":
        named = {k: v for k, v in named.items() if k == "ema"}
        arguments["profiler"] = bench.Clock()
    if config["run"] == "inspect":
        named["inspect"] = config["inspect"]
    callbacks = _built(Callback, "callbacks", named)
    loggers = _built(
        Logger, "logger", config["logger"] if config["run"] in ("train", "test") else {}
    )
    try:
        trainer = Trainer(
            **arguments,
            callbacks=callbacks,
            logger=loggers or False,
            precision=config["precision"],
            default_root_dir=str(folder),
            enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
            enable_progress_bar="progress" in named and bool(named["progress"]),
        )
    except Exception as error:  # Lightning's of all kinds, all about these arguments
        raise UserError(f"trainer: {first_line(error)}") from error
    if timeout is not None and hasattr(trainer.strategy, "_timeout"):
        trainer.strategy._timeout = timedelta(seconds=timeout)
    # Lightning's answer to SIGTERM is a broadcast inside the handler and exit code 0; ours
    # are the callback SaveOnSignal in fit, and launch/signals.py.
    trainer._signal_connector.register_signal_handlers = raise_received  # type: ignore[method-assign]
    return trainer


def _built(kind: type, at: str, nodes: Mapping[str, Any] | None) -> list[Any]:
    """The objects of a collection, each of the kind that belongs there."""
    built = []
    for name, node in (nodes or {}).items():
        if node:
            thing = build(node, at=f"{at}.{name}")
            if not isinstance(thing, kind):
                raise UserError(f"{at}.{name}: {node['_target_']} is no {kind.__name__}")
            built.append(thing)
    return built


def _only_for_training(node: Mapping[str, Any] | None) -> bool:
    target = str((node or {}).get("_target_", ""))
    return target.rpartition(".")[2] in _TRAINING_ONLY
