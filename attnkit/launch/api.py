"""`attnkit.run` and `attnkit.sweep`: runs from Python, for notebooks, scripts and tests."""

from __future__ import annotations

import logging
import os
import random
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from csv import DictReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnkit.launch import folder as folders
from attnkit.launch.command import quoted
from attnkit.launch.config import hydra_words
from attnkit.launch.config.compose import Composer, readable
from attnkit.launch.decide import Request, decide
from attnkit.launch.several import carry_out
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import absolute

if TYPE_CHECKING:
    from attnkit.launch.decide import Job
    from attnkit.launch.run import Run


def run(*words: str, config_dir: str | Path | None = None, **values: Any) -> Run:
    """Train, test, predict, explain, export or benchmark in this process.

        run = attnkit.run("task=vit", trainer={"max_epochs": 3}, run_dir="runs/one")
        run.results["test/accuracy"], run.module, run.data, run.folder
        run.explain(method="relevance").save("seen.png")
        attnkit.run("run=predict", ckpt=run.folder, images="photos")

    It does the same as the command line. `words` are overrides as typed there; keywords take Python
    values. Both are checked in the same way, and the run folder holds the same files. Random
    states, torch's number of threads, loggers, warnings, `sys.path` and the environment are
    restored afterwards. Several processes (`trainer=cpu_ddp`) are started as by the command.

    Args:
        words: overrides as on the command line: "task=vit", "data=image_folder", "+model.extra=1".
        config_dir: a folder of your own configurations, as `--config-dir`.
        values: keys of the configuration. A value is a number, text, path, list or None, or a dict
            of the keys below it.

    Returns:
        the run. Its attributes are `results` (the numbers of results.json, over several seeds their
        means and standard deviations), `module` (with the best weights if the run kept them),
        `data`, `trainer`, `folder` and `config`; its method `explain` explains its predictions.
        Of several seeds, `module`, `data` and `trainer` are those of the last.

    Raises:
        UserError: the command line would refuse these settings; the message is the same.
        RunError: the run failed, for example because memory ran out.
    """
    with _restored_state():
        composer, overrides, _ = _read(words, config_dir, values, multirun=False)
        request = Request.read(composer, overrides)
        mode = request.mode
        if not mode.is_run:
            raise UserError(
                f"run={mode.name}: expected a run that leaves a folder of its own\n"
                f"  on the command line: attnkit run={mode.name} …"
            )
        job = decide(request)
        run = carry_out(job) or _reopened(job)
        if run.mode.trains and not any(name.startswith("test/") for name in run.results):
            run.restore(run.best)  # as a test would have done
        run.folder = job.folder
        return run


def sweep(*words: str, config_dir: str | Path | None = None, **values: Any) -> list[dict[str, Any]]:
    """Run a trial for each combination of several values, as `-m` does on the command line.

        rows = attnkit.sweep("task=vit", "model.depth=2,4", trainer={"max_epochs": 3})
        rows[0]["test/accuracy"]

    Args:
        words: as for `run`. They may have several values ("model.depth=2,4") and may set Hydra's
            launcher and sweeper ("hydra/sweeper=optuna"). "resume=SWEEP_DIR" continues a sweep.
        config_dir, values: as for `run`; a list is one value.

    Returns:
        the rows of table.csv, the best trial first. Numbers are numbers, and empty cells are None.
        The column `state` marks failed trials; their folders hold the reason.

    Raises:
        UserError: the command line would refuse these settings; the message is the same.
    """
    from attnkit.launch.sweep import start

    begun: list[Path] = []
    with _restored_state():
        composer, overrides, hydra = _read(words, config_dir, values, multirun=True)
        start.sweep(composer, overrides, hydra, begun.append)
        (folder,) = begun
        with (folder / "table.csv").open(newline="", encoding="utf-8") as file:
            return [{name: _number(text) for name, text in row.items()} for row in DictReader(file)]


def _read(
    words: Sequence[str], config_dir: str | Path | None, values: Mapping[str, Any], multirun: bool
) -> tuple[Composer, list[str], list[str]]:
    """Return the composer, the overrides, and those overrides that are Hydra's own settings."""
    composer = Composer(None if config_dir is None else absolute(str(config_dir)))
    typed = [*map(readable, words), *_overrides(values)]
    overrides, hydra = hydra_words.read(composer, typed, multirun=multirun)
    return composer, list(overrides), list(hydra)


def _number(text: str) -> int | float | str | None:
    """Return a table cell as a number if it is one, else as text; None if it is empty."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text or None


def _reopened(job: Job) -> Run:
    """Return a run that other processes carried out, or that was finished before, with its weights:
    the best ones of a training if they were kept."""
    from attnkit.launch import console
    from attnkit.launch.run import Run
    from attnkit.lightning.build import allowing
    from attnkit.lightning.resume import checkpoints

    console.quiet()
    home = Path(job.runs[-1]["run_dir"])
    config = folders.load_config(home)
    ckpt = config["ckpt"]
    if job.mode.trains:
        kept = home / folders.CHECKPOINTS
        best = kept / "best.ckpt"
        ckpt = best if best.is_file() else checkpoints.newest_intact(kept).path
    with allowing(*job.allow):
        run = Run({**config, "run": "test", "ckpt": ckpt and str(ckpt)}, alone=job.alone)
        run.make_own_data()
        run.make_module()
        run.restore()
        run.make_trainer()
    run.config, run.mode = config, job.mode
    return run


def _overrides(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield Python values as overrides of the command line."""
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            yield from _overrides(value, f"{key}.")
        else:
            yield f"{key}={_text(key, value)}"


def _text(key: str, value: Any) -> str:
    """Return a Python value in the syntax of Hydra's overrides."""
    if getattr(value, "ndim", None) == 0:  # a number of NumPy or torch
        value = value.item()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        is_plain = re.fullmatch(r"(\.{0,2}/|[A-Za-z_])[\w./+-]*", text, re.ASCII)
        return text if is_plain and text.lower() not in _NO_TEXTS else quoted(text)
    if isinstance(value, list | tuple):
        return f"[{','.join(_text(key, one) for one in value)}]"
    if isinstance(value, Mapping):
        inner = (f"{name}:{_text(key, one)}" for name, one in value.items())
        return f"{{{','.join(inner)}}}"
    raise UserError(
        f"{key}: expected a number, a text, a path, a list, a dict or None, got "
        f"{type(value).__name__}"
    )


_NO_TEXTS = {"null", "true", "false", "nan", "inf"}
"""Words that Hydra does not read as text."""


@contextmanager
def _restored_state() -> Iterator[None]:
    """Restore the state of the process that a run changes."""
    import lightning.pytorch  # noqa: F401  # makes its loggers
    import numpy as np
    import torch

    loggers = [logging.getLogger(name) for name in (None, *_LOGGERS)]
    before = [(one, one.level, one.propagate, one.handlers[:]) for one in loggers]
    levels = [(handler, handler.level) for one in loggers for handler in one.handlers]
    environment, path, threads = os.environ.copy(), sys.path[:], torch.get_num_threads()
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
    show_warning = warnings.showwarning
    is_exact = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    tries_kernels = torch.backends.cudnn.benchmark
    # reading a GPU's random state would initialise CUDA here, before any ranks are started
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(gpus), warnings.catch_warnings():
            yield
    finally:
        torch.use_deterministic_algorithms(is_exact, warn_only=only_warns)
        torch.backends.cudnn.benchmark = tries_kernels
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)
        for logger, level, propagate, handlers in before:
            logger.setLevel(level)
            logger.propagate, logger.handlers[:] = propagate, handlers
        for handler, level in levels:
            handler.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        torch.set_num_threads(threads)
        warnings.showwarning = show_warning


_LOGGERS = ("attnkit", "attnkit.run", "lightning", "lightning.pytorch", "lightning.fabric")
