"""`run=check`: the job itself, cut short in a folder that goes away, and what all of it takes."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from rich.markup import escape
from rich.table import Table

from attnkit.core.multiply_adds import count_multiply_adds
from attnkit.launch.job import folder as folders
from attnkit.launch.job import out_of_memory as oom
from attnkit.launch.job import screen as report
from attnkit.launch.job.decide import Request, decide
from attnkit.launch.job.job import Job
from attnkit.launch.job.kinds import KINDS
from attnkit.launch.job.objects import make_trainer
from attnkit.launch.job.session import Session
from attnkit.launch.measure.step import step_of
from attnkit.launch.measure.stopwatch import Stopwatch
from attnkit.launch.processes.torchrun import Launcher
from attnkit.lightning.build.build import allowing
from attnkit.lightning.callbacks.cost import Cost
from attnkit.lightning.callbacks.kernel_record import KernelRecord
from attnkit.lightning.callbacks.throughput import num_samples
from attnkit.lightning.errors import RunError, UserError

# Loggers that write into the run folder and nowhere else.
_LOCAL = ("CSVLogger", "MetricsCSV", "TensorBoardLogger")
_MB = 2**20


def command(request: Request, launcher: Launcher | None = None) -> int:
    """`run=check`; returns the exit code."""
    check(decide(request), launcher)
    return 0


def check(job: Job, launcher: Launcher | None = None) -> dict[str, float]:
    """Try a job and print what it takes; nothing is left behind.

    Returns:
        `parameters`, `trainable_parameters`, `multiply_adds` of a sample (or graph), `seconds` of
        the whole job, `epoch_seconds`, `step_seconds`, `batches` of an epoch, `epochs`,
        `peak_memory` and `peak_gpu_memory` in bytes; those that are known.

    Raises:
        UserError: what the job would refuse.
        RunError: what it would fail of, such as too little memory.
    """
    if launcher:
        raise UserError(
            f"run=check: not under {launcher.name}; it is one process\n"
            "  trainer.devices and num_nodes tell it of how many"
        )
    report.quiet()
    report.print_(
        f"{escape(job.config['task'])} · check · a part of the job, in a folder that goes"
    )
    with (
        allowing(*job.allow),
        _without_bytecode(),
        _temporary() as folder,
        report.logging_to(Path(folder)),
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),  # what the job says of itself is not of the whole of it
    ):
        figures, kernels, unknown = _tried(job, Path(folder))
    _show(job, figures, kernels, unknown)
    return figures


def _tried(job: Job, folder: Path) -> tuple[dict[str, float], KernelRecord, list[str]]:
    config, unknown = _moved(job.runs[0], folder)
    given = config["trainer"] or {}
    config["trainer"] = {**given, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}
    world = make_trainer(config, KINDS["train"]).world_size
    if world > 1:
        one = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
        config["trainer"] = {**config["trainer"], **one}
        unknown.append(f"what {world} processes wait for each other; measured is one of them alone")
    watch = Stopwatch()
    kernels = KernelRecord(verbose=False)

    def begin(session: Session) -> bool:
        trainer = session.trainer
        trainer.fit_loop.min_epochs = 0
        trainer.fit_loop.epoch_loop.min_steps = None
        trainer.callbacks += [kernels, watch]  # type: ignore[attr-defined]
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)
        return True

    work = Session(config, begin=begin)
    try:
        with watch.cutting():
            work.run()
    except oom.OutOfMemory as error:
        batch = (config.get("data") or {}).get("batch_size")
        raise RunError(
            f"out of memory with batches of {batch}\n  {error}\n"
            f"  training would try again with half of it, at most {oom.MOST} times"
        ) from None
    trainer, module = work.trainer, work.module
    device = trainer.strategy.root_device
    own = [p.numel() for p in module.parameters() if p.requires_grad]
    figures: dict[str, float] = {
        "parameters": work.num_parameters,
        "trainable_parameters": sum(own),
        "peak_memory": _peak_memory(),
    }
    if device.type == "cuda":
        figures["peak_gpu_memory"] = torch.cuda.max_memory_allocated(device)
    one_run = watch.seconds(trainer, _since_the_start(), given, world)
    if math.isfinite(one_run):
        figures["seconds"] = one_run * len(job.runs)
        figures["epoch_seconds"] = watch.epoch_seconds(given, world)
    if watch.steps:
        figures["step_seconds"] = sum(watch.steps) / len(watch.steps)
    figures["batches"] = watch.batches("train", world)
    figures["epochs"] = watch.epochs(trainer, figures["batches"] or 1, given)
    count = _multiply_adds(trainer, module, watch.batch)
    if count is not None:
        figures["multiply_adds"] = count
    unknown += _unknown(work, figures)
    return figures, kernels, unknown


def _moved(config: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The configuration of the training in another folder, and what is left out there."""
    config = folders.relocate(dict(config), Path(config["run_dir"]), folder)
    loggers = dict(config.get("logger") or {})
    out = [k for k, node in loggers.items() if node and not _target(node).endswith(_LOCAL)]
    callbacks = {k: _inside(node, folder) for k, node in (config.get("callbacks") or {}).items()}
    loggers = {k: _inside(node, folder) for k, node in loggers.items() if k not in out}
    moved = {**config, "run": "train", "run_dir": str(folder)}
    moved |= {"callbacks": callbacks, "logger": loggers}
    return moved, [f"what logger.{name} costs: it was left out" for name in out]


def _inside(node: Any, folder: Path) -> Any:
    """What attnkit's and Lightning's own would write elsewhere, they write here."""
    if not isinstance(node, dict) or not _target(node).startswith(("attnkit.", "lightning.")):
        return node
    absolute = {
        key: str(folder / "elsewhere" / value.lstrip(os.sep))
        for key, value in node.items()
        if isinstance(value, str)
        and os.path.isabs(value)
        and not Path(value).is_relative_to(folder)
    }
    return {**node, **absolute}


def _target(node: Mapping[str, Any]) -> str:
    return str(node.get("_target_", ""))


def _multiply_adds(trainer: Trainer, module: LightningModule, batch: Any) -> float | None:
    """Of the module's example; without one, of a training step, for each sample or whole graph."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    known = next((c.results for c in callbacks if isinstance(c, Cost)), {})
    if "multiply_adds" in known:
        return known["multiply_adds"]
    with suppress(Exception):  # a step of somebody's own, outside of training
        count = count_multiply_adds(step_of(trainer, module, batch))
        return count if _is_graph(batch) else count / num_samples(batch)
    return None


def _is_graph(batch: Any) -> bool:
    return hasattr(batch, "edge_index")


def _unknown(work: Session, figures: Mapping[str, float]) -> list[str]:
    """What a few steps can't tell."""
    callbacks: list[Any] = work.trainer.callbacks  # type: ignore[attr-defined]
    unknown = []
    if any(type(c).__name__ == "EarlyStopping" for c in callbacks):
        unknown.append("whether early stopping ends it sooner; the time is that of all epochs")
    if "seconds" not in figures:
        unknown.append("the time: neither trainer.max_epochs nor max_steps ends it")
    if "multiply_adds" not in figures:
        unknown.append("multiply-adds: the step can't be run by itself")
    if (work.config.get("trainer") or {}).get("max_time"):
        unknown.append("what trainer.max_time leaves of it")
    if (work.config.get("data") or {}).get("num_workers"):
        unknown.append("the memory of data workers, which comes on top")
    return unknown


# --- the process ----------------------------------------------------------------------------------


@contextmanager
def _temporary() -> Iterator[str]:
    try:
        folder = tempfile.TemporaryDirectory(prefix="attnkit-check-")
    except OSError as error:
        raise UserError(f"run=check: no temporary folder: {error.strerror}; set TMPDIR") from error
    with folder as path:
        yield path


@contextmanager
def _without_bytecode() -> Iterator[None]:
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _since_the_start() -> float:
    """Seconds this process has lived, its imports included."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = float(stat.read().rpartition(")")[2].split()[19])
            return float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.process_time()


def _peak_memory() -> int:
    """Bytes of memory this process held at most."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


# --- the table ------------------------------------------------------------------------------------


def _show(
    job: Job, figures: Mapping[str, float], kernels: KernelRecord, unknown: list[str]
) -> None:
    table = Table(title=f"{job.config['task']} · check", title_justify="left", show_header=False)
    table.add_column("what", overflow="fold")
    table.add_column("figure", overflow="fold")
    for name, value in (*_rows(figures, len(job.runs)), *_kernel_rows(kernels)):
        table.add_row(escape(name), escape(value))
    for line in unknown:
        table.add_row("not known", escape(line))
    report.print_table(table)


def _rows(figures: Mapping[str, float], runs: int) -> Iterator[tuple[str, str]]:
    yield "parameters", f"{figures['parameters']:,.0f}"
    yield "trained", f"{figures['trainable_parameters']:,.0f}"
    if "multiply_adds" in figures:
        yield "multiply-adds of a sample", f"{figures['multiply_adds']:,.0f}"
    yield "peak memory", f"{figures['peak_memory'] / _MB:,.0f} MiB of the process"
    if "peak_gpu_memory" in figures:
        yield "peak memory of the GPU", f"{figures['peak_gpu_memory'] / _MB:,.0f} MiB of tensors"
    if "step_seconds" in figures:
        yield "a batch of training", f"{1000 * figures['step_seconds']:,.1f} ms"
    times = "" if runs == 1 else f", {runs} runs"
    yield "epochs × batches", f"{figures['epochs']:,g} × {figures['batches']:,g}{times}"
    if "seconds" in figures:
        yield "an epoch, with validation", f"{figures['epoch_seconds']:,.3g} s"
        yield "time of the whole job", _duration(figures["seconds"])


def _kernel_rows(record: KernelRecord) -> Iterator[tuple[str, str]]:
    """Each layer's kernel, and that of validation where it is another."""
    stages = {stage: counts.counts for stage, counts in record.records.items()}
    for layer in dict.fromkeys(name for counts in stages.values() for name in counts):
        ran = {stage: ", ".join(counts.get(layer, ())) for stage, counts in stages.items()}
        alike = len(set(ran.values())) == 1
        each = next(iter(ran.values())) if alike else ", ".join(
            f"{stage}: {kernels or 'none'}" for stage, kernels in ran.items()
        )  # fmt: skip
        yield f"kernel of {layer or 'the model'}", each
    if not stages or not any(stages.values()):
        yield "kernels", "no attention ran"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
