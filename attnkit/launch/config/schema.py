"""The keys every task understands; everything below them is the constructors' own.

The dataclass is read like any other constructor (signatures.py), so that there is one check and one
form of message for `seed=abc` and for `model.depth=abc`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TARGET = f"{__name__}.Config"
TRAINER_EXTRAS = f"{__name__}.TrainerExtras"
REPRODUCE = f"{__name__}.Reproduce"


@dataclass
class Config:
    """What stands at the top of a configuration."""

    task: str
    """Name of the task; the run folder is outputs/<task>/<date_time>."""
    level: str | None = None
    """What of the task's data is learned, where it has several levels."""
    run: str = "train"
    """What to do: one of `MODES` (launch/modes)."""

    module: dict[str, Any] | None = None
    """The LightningModule; gets those of `PARTS` that it takes."""
    model: dict[str, Any] | None = None
    """The network. A null below it is filled in from the data."""
    backbone: dict[str, Any] | None = None
    """The network that `model` puts attention into, if it does."""
    attention: dict[str, Any] | None = None
    """What it puts there; a mapping without keys: nothing."""
    encoder: dict[str, Any] | None = None
    """The part of `model` that reads the input, if it has one."""
    decoder: dict[str, Any] | None = None
    """The part that writes the output."""
    data: dict[str, Any] | None = None
    """The LightningDataModule."""
    predict: dict[str, Any] | None = None
    """The LightningDataModule of run=predict, which gets `images`; or a callback of a prediction of
    `data`, as it is also without it."""
    export: dict[str, Any] | None = None
    """What run=export gives the module to."""
    explain: dict[str, Any] | None = None
    """What run=explain explains, how, and how far it is judged."""
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    finetune: dict[str, Any] | None = None
    """What is trained of the model, and how fast: a function of the model."""
    distill: dict[str, Any] | None = None
    """The teacher of a training: a callback, which takes part where `teacher` is not null."""
    trainer: dict[str, Any] | None = None
    """Arguments of lightning.Trainer, and those of `TrainerExtras`."""
    logger: dict[str, Any] | None = None
    callbacks: dict[str, Any] | None = None

    seed: int = 0
    seeds: int = 1
    """Number of runs, with seed, seed + 1, …, each in its own folder."""
    splits: int | Literal["all"] | None = None
    """Number of runs, with data.split=0, 1, …, each in its own folder."""
    run_dir: str | Path | None = None
    """Where to write: a new or an empty folder."""
    init: str | Path | None = None
    """A run folder, checkpoint or other weights to start training from."""
    resume: str | Path | None = None
    """A run folder to go on in, or latest."""
    sweep: str | Path | None = None
    """The folder of a sweep, for run=retry and run=report."""
    ckpt: str | Path | None = None
    """A checkpoint, or a run folder (its best.ckpt)."""
    images: str | Path | None = None
    """For run=predict and explain, where the task has `predict`: a folder or a file."""
    compile: bool | Literal["default", "reduce-overhead", "max-autotune"] = False
    """torch.compile of the model, with this mode."""
    precision: str | int = 32
    """As lightning.Trainer's: 32, bf16-mixed, 16-mixed, …"""
    rank_logs: bool = False
    """Also a log of every further process of a run: run_rank1.log, …"""
    allow: list[str] | None = None
    """Packages of your own that may be named; on the command line only."""
    vars: dict[str, Any] | None = None
    """Yours, for interpolations: dim: ${vars.dim}."""
    record: dict[str, Any] | None = None
    """Of an experiment, the figure that it reproduces (launch/records/record.py)."""
    reproduce: dict[str, Any] | None = None
    """Which records run=reproduce runs: arguments of `Reproduce`."""


@dataclass
class TrainerExtras:
    """Arguments of `trainer` beside those of lightning.Trainer."""

    limit_batches: int | float | None = None
    """All its limit_*_batches: a number of batches or a fraction."""
    minutes: int | float | None = None
    """How long a training takes, in the place of max_epochs."""
    timeout_seconds: int | float | None = None
    """How long a process waits for the others of its run."""
    oom_retry: bool = True
    """Whether to try again with half the batch when memory runs out."""


@dataclass
class Reproduce:
    """The settings of run=reproduce; without any, it lists the records."""

    name: str | list[str] | None = None
    """One record, or several."""
    minutes: int | float | None = None
    """All records that together take no longer, and whose data is there."""


# Nodes that are one object (`_target_` needed when not null), in the order they are reported.
OBJECTS = (
    "module", "model", "backbone", "attention", "encoder", "decoder", "data", "predict",
    "export", "explain", "optimizer", "scheduler", "finetune", "distill",
)  # fmt: skip

# What the tasks of this package learn, by `level`: those of one are not those of another.
LEVELS = {
    "graph": ("node", "node_values", "link", "graph", "graph_values"),
    **dict.fromkeys(("vit", "spatial", "channel"), ("image", "image_values")),
}

# Keys that are looked for in the wrong place, and what to write instead.
INSTEAD = {
    "layer_decay": "finetune.layer_decay",
    "head_lr": "finetune.head_lr",
    "freeze": "finetune=head, last_blocks, lora or bitfit",
    "nodes": "of run=explain: explain.nodes=[12,51]",
    "graphs": "of run=explain: explain.graphs=[3,7]",
    "pairs": "of run=explain: explain.pairs=[[3,7]]",
}

# Nodes that hold several objects by name.
COLLECTIONS = ("logger", "callbacks")

# What a run brings itself, if null does not leave it out, and what can be set of it.
BROUGHT: dict[str, dict[str, str]] = {
    "logger": {},
    "callbacks": {
        "safe": "nothing can be set",
        "accumulation": "nothing can be set",
        "last": "only callbacks.checkpoint.every_seconds is set",
    },
}

# Callbacks of earlier versions, and what leaves out what they wrote.
FORMER = {
    "cost": "expected callbacks.steps.cost=false",
    "throughput": "expected callbacks.steps.throughput=false",
    "results": "every run writes results.json",
}

# Arguments of lightning.Trainer that have a place of their own.
ELSEWHERE = {
    "logger": "logger.<name>",
    "callbacks": "callbacks.<name>",
    "precision": "precision",
    "default_root_dir": "run_dir",
    "enable_checkpointing": "callbacks.checkpoint",
}

# Those that would do nothing here, or take away what a run is.
UNUSED = {
    "model_registry": "it uploads checkpoints to a platform; a run keeps them in run_dir",
    "barebones": "it leaves out callbacks and checkpoints; to measure a step: run=bench",
}

# What numbers must be, in words and as a test. lightning.Trainer takes its own without a look, and
# fails on them later or ignores them.
NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "seed": ("0 to 4294967295", lambda number: 0 <= number < 2**32),
    "seeds": ("1 to 1000 runs", lambda number: 1 <= number <= 1000),
    "splits": ("all, or 1 to 1000 runs", lambda number: 1 <= number <= 1000),
    "trainer.accumulate_grad_batches": ("at least 1", lambda number: number >= 1),
    "trainer.check_val_every_n_epoch": ("at least 1", lambda number: number >= 1),
    "trainer.gradient_clip_val": ("at least 0", lambda number: number >= 0),
    "trainer.log_every_n_steps": ("at least 0", lambda number: number >= 0),
    "trainer.limit_batches": ("more than 0", lambda number: number > 0),
    "trainer.limit_train_batches": ("more than 0", lambda number: number > 0),
    "trainer.minutes": ("more than 0", lambda number: 0 < number < math.inf),
    "trainer.timeout_seconds": ("more than 0", lambda number: number > 0),
    "trainer.max_epochs": ("at least 1, or -1 for no end", bool),
    "trainer.max_steps": ("at least 1, or -1 for no end", bool),
}

# Nodes in which a null is filled in from what the data module says of itself.
FILLED = ("model", "module", "encoder", "decoder")

# Nodes in which a null is still to be filled in when the configuration is checked.
NULLABLE = (*FILLED, "predict")

# Parts the module's constructor is given, when it takes them.
PARTS = ("model", "optimizer", "scheduler", "finetune")

# Parts the model's constructor is given, when it takes them.
MODEL_PARTS = ("backbone", "attention", "encoder", "decoder")

# What may change in a run that is resumed: nothing that the model or its training depends on.
RESUMABLE = (
    "trainer.",
    "callbacks.",
    "logger.",
    "data.num_workers",
    "data.root",
    "compile",
    "rank_logs",
)
