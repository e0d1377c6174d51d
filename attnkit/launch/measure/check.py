"""`run=check`: a part of the job itself, in a temporary folder, and what the whole of it takes."""

from __future__ import annotations

import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from attnkit.core.operators.multiply_adds import count_multiply_adds
from attnkit.launch import STARTED
from attnkit.launch.job import folder as folders
from attnkit.launch.job import out_of_memory as oom
from attnkit.launch.job import screen as report
from attnkit.launch.job.job import Job
from attnkit.launch.job.kinds import KINDS
from attnkit.launch.job.request import Request, decide
from attnkit.launch.job.run import Run
from attnkit.launch.job.trainer import make_trainer
from attnkit.launch.measure.step import step_of
from attnkit.launch.measure.stopwatch import Stopwatch
from attnkit.launch.measure.trained import memory_rows, trained_rows
from attnkit.launch.processes.torchrun import Launcher
from attnkit.lightning.build.build import allowing
from attnkit.lightning.callbacks.cached_features import CachedFeatures
from attnkit.lightning.callbacks.cost import Cost
from attnkit.lightning.callbacks.kernel_record import KernelRecord
from attnkit.lightning.callbacks.throughput import num_samples
from attnkit.lightning.errors import RunError, UserError
from attnkit.lightning.telling.text import cell

# Loggers that write into the run folder and nowhere else.
_LOCAL = ("CSVLogger", "MetricsCSV", "TensorBoard", "TensorBoardLogger")


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
        RunError: what would make it fail, such as too little memory.
    """
    if launcher:
        raise UserError(
            f"run=check: not under {launcher.name}; it is one process\n"
            "  trainer.devices and num_nodes tell it of how many"
        )
    report.quiet()
    report.print_(
        f"{cell(job.config['task'])} · check · runs a part of the job in a temporary folder"
    )
    with ExitStack() as stack:
        sys.dont_write_bytecode = True  # for good: this process only checks
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="attnkit-check-"))
        except OSError as error:
            raise UserError(f"TMPDIR: run=check needs a temporary folder: {error}") from None
        stack.enter_context(allowing(*job.allow))
        stack.enter_context(report.logging_to(Path(folder)))
        # The job's own table is of a part of it.
        stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        figures, kernels, trained, unknown = _tried(job, Path(folder))
    _show(job, figures, (*trained, *_kernel_rows(kernels)), unknown)
    return figures


def _tried(
    job: Job, folder: Path
) -> tuple[dict[str, float], KernelRecord, list[tuple[str, str]], list[str]]:
    config, unknown = _moved(job.runs[0], folder)
    given = config["trainer"] or {}
    config["trainer"] = {**given, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}
    world = make_trainer(config, KINDS["train"]).world_size
    if world > 1:
        one = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
        config["trainer"] = {**config["trainer"], **one}
        unknown.append(f"what {world} processes wait for each other; measured is one of them alone")

    def on_ready(run: Run) -> bool:
        callbacks: list[Any] = run.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(c, KernelRecord) for c in callbacks):
            callbacks.append(KernelRecord(verbose=False))
        callbacks.append(Stopwatch(run.trainer, given, world))
        return True

    work = Run(config, on_ready=on_ready)
    try:
        work.carry_out()
    except oom.OutOfMemory as error:
        batch = (config.get("data") or {}).get("batch_size")
        raise RunError(
            f"out of memory with batches of {batch}\n  {error}\n"
            f"  training would try again with half of it, at most {oom.MOST} times"
        ) from None
    trainer, module = work.trainer, work.module
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    watch = next(c for c in callbacks if isinstance(c, Stopwatch))
    record = next(c for c in callbacks if isinstance(c, KernelRecord))
    figures: dict[str, float] = {
        "parameters": work.num_parameters,
        "trainable_parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "batches": watch.batches("train"),
        "epochs": watch.epochs(),
        "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
    }
    device = trainer.strategy.root_device
    if device.type == "cuda":
        figures["peak_gpu_memory"] = torch.cuda.max_memory_allocated(device)
    if watch.times["train"]:
        figures["step_seconds"] = watch.mean("train")
    one_run = watch.seconds(time.perf_counter() - STARTED)
    if math.isfinite(one_run):
        figures["seconds"] = one_run * len(job.runs)
        figures["epoch_seconds"] = watch.epoch_seconds()
    else:
        unknown.append("the time: neither trainer.max_epochs nor max_steps ends it")
    # Of the module's example; without one, of a training step, for each sample or whole graph.
    found = next((c.results.get("multiply_adds") for c in callbacks if isinstance(c, Cost)), None)
    if found is None:
        with suppress(Exception):  # a step of somebody's own, outside of training
            found = count_multiply_adds(step_of(trainer, module, watch.batch))
            found /= 1 if hasattr(watch.batch, "edge_index") else num_samples(watch.batch)
    if found is None:
        unknown.append("multiply-adds: the step can't be run by itself")
    else:
        figures["multiply_adds"] = found
    trained = list(trained_rows(module))
    try:
        step = step_of(trainer, module, watch.batch)
        trained += memory_rows(module, trainer.optimizers, step)
    except Exception:  # a step of somebody's own, or all of it does not fit
        unknown.append("the memory that is saved against finetune=full")
    if any(isinstance(c, CachedFeatures) for c in callbacks):
        unknown.append("how much less an epoch takes where features are kept from the one before")
    if any(type(c).__name__ == "EarlyStopping" for c in callbacks):
        unknown.append("whether early stopping ends it sooner; the time is that of all epochs")
    if given.get("max_time"):
        unknown.append("when trainer.max_time ends it")
    if (config.get("data") or {}).get("num_workers"):
        unknown.append("the memory of data workers, which comes on top")
    return figures, record, trained, unknown


def _moved(config: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The configuration of the training in another folder, and what is left out there."""
    config = folders.relocate(dict(config), Path(config["run_dir"]), folder)
    nodes: dict[str, Any] = {}
    out = []
    for key in ("callbacks", "logger"):
        nodes[key] = {}
        for name, node in (config.get(key) or {}).items():
            target = str((node or {}).get("_target_", ""))
            if key == "logger" and node and not target.endswith(_LOCAL):
                out.append(f"what logger.{name} costs: it was left out")
            elif target.startswith(("attnkit.", "lightning.")):
                nodes[key][name] = {k: _inside(v, folder) for k, v in node.items()}
            else:
                nodes[key][name] = node
    return {**config, **nodes, "run": "train", "run_dir": str(folder)}, out


def _inside(value: Any, folder: Path) -> Any:
    """An absolute path that attnkit or Lightning would write to, in the folder instead."""
    absolute = isinstance(value, str) and os.path.isabs(value)
    if not absolute or Path(value).is_relative_to(folder):
        return value
    return str(folder / "elsewhere" / value.lstrip(os.sep))


# --- the table ------------------------------------------------------------------------------------

_ROWS = {  # of each figure: its name, how it is written, and in which unit
    "parameters": ("parameters", "{:,.0f}", 1),
    "trainable_parameters": ("trained parameters", "{:,.0f}", 1),
    "multiply_adds": ("multiply-adds of a sample", "{:,.0f}", 1),
    "peak_memory": ("peak memory", "{:,.0f} MiB of the process", 2**-20),
    "peak_gpu_memory": ("peak memory of the GPU", "{:,.0f} MiB of tensors", 2**-20),
    "step_seconds": ("a batch of training", "{:,.1f} ms", 1000),
    "epoch_seconds": ("an epoch, with validation", "{:,.3g} s", 1),
}


def _show(
    job: Job,
    figures: Mapping[str, float],
    more: Sequence[tuple[str, str]],
    unknown: list[str],
) -> None:
    table = Table(title=f"{job.config['task']} · check", title_justify="left", show_header=False)
    table.add_column("what", overflow="fold")
    table.add_column("figure", overflow="fold")
    rows = [
        (name, text.format(figures[key] * factor))
        for key, (name, text, factor) in _ROWS.items()
        if key in figures
    ]
    times = "" if len(job.runs) == 1 else f", {len(job.runs)} runs"
    count = f"{figures['epochs']:,g} × {figures['batches']:,g}{times}"
    rows.append(("epochs × batches", count))
    if (seconds := figures.get("seconds")) is not None:
        minutes = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
        whole = minutes if seconds < 5400 else f"{seconds / 3600:.1f} h"
        rows.append(("time of the whole job", whole))
    for name, value in (*rows, *more, *(("not known", x) for x in unknown)):
        table.add_row(cell(name), cell(value))
    report.print_table(table)


def _kernel_rows(record: KernelRecord) -> Iterator[tuple[str, str]]:
    """Each layer's kernel, and that of validation where it is another."""
    stages = {stage: counts.counts for stage, counts in record.records.items()}
    for layer in dict.fromkeys(name for counts in stages.values() for name in counts):
        ran = {stage: ", ".join(counts.get(layer, ())) for stage, counts in stages.items()}
        first = next(iter(ran.values()))
        alike = all(kernels == first for kernels in ran.values())
        each = ", ".join(f"{stage}: {kernels or 'none'}" for stage, kernels in ran.items())
        yield f"kernel of {layer or 'the model'}", first if alike else each
    if not any(stages.values()):
        yield "kernels", "no attention ran"
