"""Builds the trainer of a run, with the callbacks and loggers that take part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar, Timer, WeightAveraging
from lightning.pytorch.loggers import Logger

from attnkit.launch import folder as folders
from attnkit.launch.modes import Mode
from attnkit.launch.processes.process import raise_received
from attnkit.lightning._private import replace_signal_handling, set_timeout
from attnkit.lightning.build import build
from attnkit.lightning.callbacks.loss import ExactAccumulation
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.modules.checks import MonitorsInSanityCheck
from attnkit.lightning.resume.best_and_last import LastCheckpoint
from attnkit.lightning.resume.checkpoints import SafeCheckpoints

LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
_HOOKS = {
    "fit": (
        *("on_fit_", "on_train_", "on_validation_", "on_sanity_", "on_before_"),
        *("on_after_backward", "on_save_checkpoint", "on_test_"),  # a training ends with a test
    ),
    "test": ("on_test_",),
    "predict": ("on_predict_", "write_on_"),
}


class Elapsed(Timer):
    """Lightning's timer under its own name; a checkpoint stores the time until it was written."""


def make_trainer(config: Mapping[str, Any], mode: Mode, asked: Collection[str] = ()) -> Trainer:
    """Return the trainer that `trainer`, `callbacks` and `logger` describe, as the mode uses them.

    Args:
        asked: names of callbacks that the command line mentions; one that takes no part in this
            mode is refused.

    Raises:
        UserError: one of these settings is wrong.
    """
    if "trainer" not in mode.uses:
        return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    arguments = dict(config.get("trainer") or {})
    arguments.pop("oom_retry", None)
    timeout = arguments.pop("timeout_seconds", None)
    minutes = arguments.pop("minutes", None)
    limit = arguments.pop("limit_batches", None)
    if limit is not None:
        arguments = {**dict.fromkeys(LIMITS, limit), **arguments}
    built = _built(Callback, "callbacks", config.get("callbacks"))
    distilled = {"distill": config.get("distill")} if _distills(config, mode) else {}
    named = {**_own(config, mode), **_built(Callback, "", distilled), **built}
    idle = [name for name, callback in named.items() if not takes_part(type(callback), mode.stage)]
    for name in (name for name in idle if name in asked):
        target = config["callbacks"][name]["_target_"]
        reason = f": it has no hook of {mode.stage}" if mode.stage else ""
        raise UserError(f"callbacks.{name}: {target} has no effect in run={mode.name}{reason}")
    callbacks = [callback for name, callback in named.items() if name not in idle]
    callbacks.sort(key=lambda c: isinstance(c, LastCheckpoint))  # last: it saves the others' state
    shown = arguments.pop("enable_progress_bar", None)
    if shown is False:
        callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
    elif shown is None:
        shown = any(isinstance(callback, ProgressBar) for callback in callbacks)
    if mode.trains:
        callbacks.append(MonitorsInSanityCheck())
    if minutes is not None:
        from attnkit.lightning.callbacks.minutes import Minutes

        callbacks.insert(0, Minutes(minutes))  # first: it sets the number of epochs
    loggers = _built(Logger, "logger", config["logger"] if "logger" in mode.uses else {})
    try:
        trainer = Trainer(
            **arguments,
            callbacks=callbacks,
            logger=list(loggers.values()) or False,
            precision=config["precision"],
            default_root_dir=str(Path(config["run_dir"])),
            enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
            enable_progress_bar=shown,
        )
    except Exception as error:  # Lightning raises many types, all about these arguments
        raise UserError(f"trainer: {first_line(error)}") from error
    if mode.trains:  # inserted afterwards, since Lightning ignores max_time if it is given a Timer
        trainer.callbacks.insert(0, Elapsed())  # type: ignore[attr-defined]
    if timeout is not None:
        set_timeout(trainer, timedelta(seconds=timeout))
    # On SIGTERM, Lightning broadcasts inside the signal handler and exits with code 0. The callback
    # SaveOnSignal (during fit) and processes/process.py (otherwise) handle it instead.
    replace_signal_handling(trainer, raise_received)
    return trainer


def _own(config: Mapping[str, Any], mode: Mode) -> dict[str, Callback]:
    """Return the callbacks that every run has; null for a name leaves that callback out."""
    given = config.get("callbacks")
    if given is None or not mode.stage:
        return {}
    own: dict[str, Callback] = {"safe": SafeCheckpoints()}
    if mode.trains:
        own["accumulation"] = ExactAccumulation()  # before others look at the gradients
        pace = (given.get("checkpoint") or {}).get("every_seconds", 5.0)
        folder = Path(config["run_dir"], folders.CHECKPOINTS)
        one_name = {"filename": "last", "enable_version_counter": False}
        own["last"] = LastCheckpoint(pace, dirpath=folder, **one_name)
    return {name: callback for name, callback in own.items() if name not in given}


def _distills(config: Mapping[str, Any], mode: Mode) -> bool:
    return mode.trains and (config.get("distill") or {}).get("teacher") is not None


def takes_part(callback: type[Callback], stage: str) -> bool:
    """Return whether a callback does anything in a stage, by the hooks that its classes define.

    A callback without hooks of any stage (only `setup`, say), and one that reads checkpoints, takes
    part in all stages. Without a stage, as in a benchmark, only weight averaging takes part.
    """
    if not stage:
        return issubclass(callback, WeightAveraging)
    written = {name for cls in callback.__mro__ if cls not in _PLAIN for name in vars(cls)}
    if "on_load_checkpoint" in written or any(n.startswith(_HOOKS[stage]) for n in written):
        return True
    return not any(n.startswith(hooks) for hooks in _HOOKS.values() for n in written)


_PLAIN = (Callback, *Callback.__mro__)


def _built(kind: type, at: str, nodes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Build the objects of a collection, and check that each is of the expected kind."""
    built = {}
    for name, node in (nodes or {}).items():
        if node:
            key = f"{at}.{name}".lstrip(".")
            built[name] = build(node, at=key)
            if not isinstance(built[name], kind):
                raise UserError(f"{key}: {node['_target_']} is not a {kind.__name__}")
    return built
