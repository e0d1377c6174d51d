"""`run=check`: runs a part of the job in a temporary folder and estimates the whole job's cost."""

from __future__ import annotations

import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from functools import partialmethod
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from rich.table import Table

from attnkit.core.operators.multiply_adds import count_multiply_adds
from attnkit.finetune.memory import memory_of_step, trained_layers
from attnkit.finetune.methods import finetuned
from attnkit.launch import STARTED
from attnkit.launch import console as report
from attnkit.launch import folder as folders
from attnkit.launch.decide import Job, Request, decide
from attnkit.launch.errors import MOST_HALVINGS, OutOfMemory
from attnkit.launch.modes import MODES
from attnkit.launch.modes.bench import step_of
from attnkit.launch.processes.torchrun import Launcher
from attnkit.launch.run import Run
from attnkit.launch.trainer import make_trainer
from attnkit.lightning.build import allowing
from attnkit.lightning.callbacks.cached_features import CachedFeatures
from attnkit.lightning.callbacks.kernel_record import KernelRecord
from attnkit.lightning.callbacks.meter import Laps, Meter, num_samples
from attnkit.lightning.console import cell, say_table, seconds
from attnkit.lightning.errors import RunError, UserError

# Limits of the part that is run.
MOST = {"train": 24, "val": 4, "test": 4}  # batches in an epoch, or in each loader
WARM_UP = {"train": 2, "val": 1, "test": 1}  # batches that are not timed
ENOUGH = 5.0  # seconds after which the second epoch is the last
TOO_LONG = 30.0  # seconds after which three timed steps are enough

# Loggers that write only into the run folder.
_LOCAL = ("CSVLogger", "MetricsCSV", "TensorBoard", "TensorBoardLogger")
MOST_LAYERS = 6  # trained layers that are listed by name
MEMORY = "memory of a step beside the weights"
_WRITTEN = {  # name, format and factor of each number
    "parameters": ("parameters", "{:,.0f}", 1),
    "trainable_parameters": ("trained parameters", "{:,.0f}", 1),
    "multiply_adds": ("multiply-adds of a sample", "{:,.0f}", 1),
    "peak_memory": ("peak memory", "{:,.0f} MiB of the process", 2**-20),
    "peak_gpu_memory": ("peak memory of the GPU", "{:,.0f} MiB of tensors", 2**-20),
    "step_seconds": ("a batch of training", "{:,.1f} ms", 1000),
    "epoch_seconds": ("an epoch, with validation", "{:,.3g} s", 1),
}


def command(request: Request, launcher: Launcher | None = None) -> int:
    """Carry out `run=check` and return the exit code."""
    check(decide(request), launcher)
    return 0


def check(job: Job, launcher: Launcher | None = None) -> dict[str, float]:
    """Try a job and print its estimated cost; no file is left behind.

    Returns:
        the numbers that are known among `parameters`, `trainable_parameters`, `multiply_adds` of a
        sample (or graph), `seconds` of the whole job, `epoch_seconds`, `step_seconds`, `batches` in
        an epoch, `epochs`, `peak_memory` and `peak_gpu_memory` in bytes.

    Raises:
        UserError: the job would be refused.
        RunError: the job would fail, for example because memory runs out.
    """
    if launcher:
        raise UserError(
            f"run=check: not under {launcher.name}; it runs in one process\n"
            "  trainer.devices and trainer.num_nodes set the number of processes to assume"
        )
    report.quiet()
    task = cell(job.config["task"])
    report.print_(f"{task} · check · runs a part of the job in a temporary folder")
    with ExitStack() as stack:
        sys.dont_write_bytecode = True  # never reset, since this process only checks
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="attnkit-check-"))
        except OSError as error:
            raise UserError(f"TMPDIR: run=check needs a temporary folder: {error}") from None
        stack.enter_context(allowing(*job.allow))
        stack.enter_context(report.logging_to(Path(folder)))
        # hide the job's own table, which describes only this part
        stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        run, watch, unknown = _carry_out(job.runs[0], Path(folder))
        figures = _figures(run, watch, len(job.runs))
        trained = [*_trained_rows(run, watch)]
    unknown += _unknown(run, figures, trained)
    table = Table(title=f"{task} · check", title_justify="left", show_header=False)
    table.add_column("what", overflow="fold")
    table.add_column("figure", overflow="fold")
    rows = [*_rows(figures, len(job.runs)), *trained, *_kernel_rows(run)]
    for name, value in (*rows, *(("not known", x) for x in unknown)):
        table.add_row(cell(name), cell(value))
    say_table(table)
    return figures


# --- the part of the job --------------------------------------------------------------------------


def _carry_out(config: dict[str, Any], folder: Path) -> tuple[Run, Stopwatch, list[str]]:
    """Run a shortened training of this configuration; also return what stays unknown."""
    config, unknown = _moved(config, folder)
    given = config["trainer"] or {}
    every = {"val_check_interval": 1.0, "check_val_every_n_epoch": 1, "minutes": None}
    config["trainer"] = {**given, **every}
    world = make_trainer(config, MODES["train"]).world_size
    if world > 1:
        config["trainer"] |= {"devices": 1, "num_nodes": 1, "strategy": "auto"}
        unknown.append(
            f"the time that {world} processes wait for each other; one was measured alone"
        )
    watches = []

    def on_ready(run: Run) -> None:
        callbacks: list[Any] = run.trainer.callbacks  # type: ignore[attr-defined]
        if not _callback(run, KernelRecord):
            callbacks.append(KernelRecord(verbose=False))
        watches.append(Stopwatch(run.trainer, given, world))
        callbacks.extend(watches)

    run = Run(config, on_ready=on_ready)
    try:
        run.carry_out()
    except OutOfMemory as error:
        batch = (config.get("data") or {}).get("batch_size")
        raise RunError(
            f"out of memory with batches of {batch}\n  {error}\n"
            f"  training would try again with half of it, at most {MOST_HALVINGS} times"
        ) from None
    return run, watches[0], unknown


def _callback(run: Run, kind: type) -> Any:
    """Return the run's callback of this class, or None."""
    callbacks: list[Any] = run.trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def _moved(config: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration of the training in another folder, and what stays unknown."""
    config = folders.relocate(dict(config), Path(config["run_dir"]), folder)
    nodes: dict[str, Any] = {}
    unknown = []
    for key in ("callbacks", "logger"):
        nodes[key] = {}
        for name, node in (config.get(key) or {}).items():
            target = str((node or {}).get("_target_", ""))
            if key == "logger" and node and not target.endswith(_LOCAL):
                unknown.append(f"the time of logger.{name}, which was left out")
            elif target.startswith(("attnkit.", "lightning.")):
                nodes[key][name] = {k: _inside(v, folder) for k, v in node.items()}
            else:
                nodes[key][name] = node
    return {**config, **nodes, "run": "train", "run_dir": str(folder)}, unknown


def _inside(value: Any, folder: Path) -> Any:
    """Move an absolute path, to which attnkit or Lightning would write, into the folder."""
    absolute = isinstance(value, str) and os.path.isabs(value)
    if not absolute or Path(value).is_relative_to(folder):
        return value
    return str(folder / "elsewhere" / value.lstrip(os.sep))


# --- the cost -------------------------------------------------------------------------------------


def _figures(run: Run, watch: Stopwatch, num_runs: int) -> dict[str, float]:
    """Return the numbers that are known."""
    trained = (p.numel() for p in run.module.parameters() if p.requires_grad)
    unit = 1 if sys.platform == "darwin" else 1024
    figures: dict[str, float] = {
        "parameters": run.num_parameters,
        "trainable_parameters": sum(trained),
        "batches": watch.batches("train"),
        "epochs": watch.epochs(),
        "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }
    device = run.trainer.strategy.root_device
    if device.type == "cuda":
        figures["peak_gpu_memory"] = torch.cuda.max_memory_allocated(device)
    if watch.times["train"]:
        figures["step_seconds"] = watch.mean("train")
    one_run = watch.seconds(time.perf_counter() - STARTED)
    if math.isfinite(one_run):
        figures["seconds"] = one_run * num_runs
        figures["epoch_seconds"] = watch.epoch_seconds()
    # counted on the module's example, or else on a training step, per sample or for a whole graph
    meter = _callback(run, Meter)
    if meter and "multiply_adds" in meter.results:
        figures["multiply_adds"] = meter.results["multiply_adds"]
    else:
        with suppress(Exception):  # a user's training_step may not work outside of training
            count = count_multiply_adds(step_of(run.trainer, run.module, watch.batch))
            samples = num_samples(watch.batch)
            is_one_graph = samples == getattr(watch.batch, "num_nodes", None)
            figures["multiply_adds"] = count / (1 if is_one_graph else samples)
    return figures


def _unknown(run: Run, figures: Mapping[str, float], trained: Sequence[Any]) -> Iterator[str]:
    """Yield what a few steps can't measure."""
    if "seconds" not in figures:
        yield "the time: neither trainer.max_epochs nor max_steps ends it"
    if "multiply_adds" not in figures:
        yield "multiply-adds: the step can't be run by itself"
    if trained and trained[-1][0] != MEMORY:
        yield "the memory that is saved in comparison with finetune=full"
    if _callback(run, CachedFeatures):
        yield "how much time an epoch saves with cached features"
    if _callback(run, EarlyStopping):
        yield "whether early stopping ends it sooner; the time is that of all epochs"
    if (run.config["trainer"] or {}).get("max_time"):
        yield "when trainer.max_time ends it"
    if (run.config.get("data") or {}).get("num_workers"):
        yield "the memory of data workers, which is not included"


# --- rows of the table: pairs of name and text ----------------------------------------------------


def _rows(figures: Mapping[str, float], num_runs: int) -> Iterator[tuple[str, str]]:
    for key, (name, text, factor) in _WRITTEN.items():
        if key in figures:
            yield name, text.format(figures[key] * factor)
    times = "" if num_runs == 1 else f", {num_runs} runs"
    yield "epochs × batches", f"{figures['epochs']:,g} × {figures['batches']:,g}{times}"
    if "seconds" in figures:
        yield "time of the whole job", seconds(figures["seconds"])


def _trained_rows(run: Run, watch: Stopwatch) -> Iterator[tuple[str, str]]:
    """Yield, for a partly trained model, the trained share, the layers and the memory saved."""
    parameters = list(run.module.parameters())
    if all(parameter.requires_grad for parameter in parameters):
        return
    layers, total = trained_layers(run.module), sum(p.numel() for p in parameters)
    recorded = finetuned(run.module)
    method = f", finetune={recorded[2].method}" if recorded else ""
    yield "share that is trained", f"{layers.total() / total:.2%} of {total:,}{method}"
    named = [f"{name}  {count:,}" for name, count in layers.most_common(MOST_LAYERS)]
    if rest := layers.most_common()[MOST_LAYERS:]:
        named.append(f"{len(rest)} more  {sum(count for _, count in rest):,}")
    yield "trained", "\n".join(named)
    with suppress(Exception):  # a user's training_step may not work here, or memory may not suffice
        step = step_of(run.trainer, run.module, watch.batch)
        part, whole = memory_of_step(run.module, run.trainer.optimizers, step)
        yield MEMORY, f"{part / 2**20:,.0f} MiB; {whole / 2**20:,.0f} MiB with finetune=full"


def _kernel_rows(run: Run) -> Iterator[tuple[str, str]]:
    """Yield each layer's kernel; by stage, if validation uses another one."""
    records = _callback(run, KernelRecord).records
    stages = {stage: record.counts for stage, record in records.items()}
    for layer in dict.fromkeys(name for counts in stages.values() for name in counts):
        ran = {stage: ", ".join(counts.get(layer, ())) for stage, counts in stages.items()}
        first = next(iter(ran.values()))
        alike = all(kernels == first for kernels in ran.values())
        each = ", ".join(f"{stage}: {kernels or 'none'}" for stage, kernels in ran.items())
        yield f"kernel of {layer or 'the model'}", first if alike else each
    if not any(stages.values()):
        yield "kernels", "no attention ran"


# --- the time -------------------------------------------------------------------------------------


class Stopwatch(Callback):
    """Callback that limits a job to a few batches and seconds, and times it. It comes last.

    The time of the whole job is the time of this part, plus the mean time of a batch for each
    training, validation and test batch that was left out, plus the remaining time of an epoch for
    each epoch that was left out.

    Args:
        trainer: the trainer of the job, which gets at most `MOST` batches of a stage.
        given: the node `trainer` of its configuration.
        world: number of processes that share the batches of the whole job.
    """

    def __init__(self, trainer: Trainer, given: dict[str, Any], world: int = 1) -> None:
        self.accumulated, self.given, self.world = trainer.accumulate_grad_batches, given, world
        self._ends = trainer.max_epochs, trainer.max_steps
        self.times: dict[str, list[float]] = {stage: [] for stage in MOST}
        self.batch: Any = None
        """The last training batch."""
        self._laps = Laps()
        self._epochs: list[tuple[float, float]] = []
        """Times at which each epoch began and the last one ended, with the seconds that batches
        had taken until then."""
        self._counts: dict[str, list[float]] = {stage: [] for stage in MOST}
        self._limits = {stage: getattr(trainer, f"limit_{stage}_batches") for stage in MOST}
        for stage, limit in self._limits.items():
            few = MOST[stage] if isinstance(limit, float) else min(MOST[stage], limit)
            setattr(trainer, f"limit_{stage}_batches", few if limit else 0)
        trainer.fit_loop.min_epochs = 0
        trainer.fit_loop.epoch_loop.min_steps = None

    # --- measuring ---

    def on_train_epoch_start(self, *args: Any, **kwargs: Any) -> None:
        self._laps.start()
        self._epochs.append((self._laps.last, sum(self.times["train"]) + sum(self.times["val"])))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._note("train", trainer, pl_module)
        self.batch = batch
        timed = self.times["train"][WARM_UP["train"] :]
        # the first batches may compile kernels for longer than all others take
        elapsed = self._laps.last - self._epochs[0][0] - sum(self.times["train"]) + sum(timed)
        enough = elapsed > ENOUGH and len(self._epochs) > 1 and len(timed) > 0
        if enough or (elapsed > TOO_LONG and len(timed) >= 3):
            trainer.should_stop = True

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        self._laps.start()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_epoch_start()
        self._count("train", trainer.train_dataloader)
        self._count("val", trainer.val_dataloaders)

    on_test_start = on_validation_start

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count("test", trainer.test_dataloaders)

    def _note(self, stage: str, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.times[stage].append(self._laps.lap(pl_module))

    on_validation_batch_end = partialmethod(_note, "val")
    on_test_batch_end = partialmethod(_note, "test")

    def _count(self, stage: str, loaders: Any) -> None:
        """Record the number of batches of each loader in the whole job."""
        limit = self._limits[stage]
        for loader in CombinedLoader(loaders or []).flattened:
            length = math.inf if (known := sized_len(loader)) is None else known
            cut = length * limit if isinstance(limit, float) else min(length, limit)
            self._counts[stage].append(int(cut) if math.isfinite(cut) else cut)

    # --- the whole job ---

    def seconds(self, wall: float) -> float:
        """Return the seconds of the whole job if this part took `wall`; infinite without an end."""
        test = self.mean("test") * (self.batches("test") - len(self.times["test"]))
        measured = self._epochs[-1][0] - self._epochs[0][0]
        first = self.times["train"][: WARM_UP["train"]]
        once = max(0.0, sum(first) - len(first) * self.mean("train"))
        return wall - measured + once + self.epochs() * self.epoch_seconds() + test

    def epoch_seconds(self) -> float:
        """Return the seconds of an epoch, including validation."""
        batches = self.batches("train")
        interval = self.given.get("val_check_interval") or 1.0
        within = 1 / interval if isinstance(interval, float) else batches / interval
        validations = max(1, within // 1) / (self.given.get("check_val_every_n_epoch") or 1)
        pairs = pairwise(self._epochs)
        beside = [end - begin - (after - before) for (begin, before), (end, after) in pairs]
        own = fmean(beside[1:] or beside or [0.0])  # the first epoch includes one-time costs
        return (
            own
            + batches * self.mean("train")
            + validations * self.batches("val") * self.mean("val")
        )

    def mean(self, stage: str) -> float:
        """Return the mean seconds of a batch."""
        times = self.times[stage]
        return fmean(times[WARM_UP[stage] :] or times or [0.0])

    def epochs(self) -> float:
        """Return the number of epochs in the whole job; the last one may be incomplete."""
        if minutes := self.given.get("minutes"):
            return round(60 * minutes / (self.epoch_seconds() or math.inf), 1)
        epochs, steps = (end if end and end > 0 else math.inf for end in self._ends)
        return min(epochs, steps * self.accumulated / (self.batches("train") or 1))

    def batches(self, stage: str) -> float:
        """Return the number of batches that each process has in one pass of a stage."""
        counts = self._counts[stage]
        # several training loaders run in parallel, the shorter ones repeatedly; others in sequence
        count = max(counts, default=0) if stage == "train" else sum(counts)
        return math.ceil(count / self.world) if math.isfinite(count) else count
