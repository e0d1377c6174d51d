"""The top-level keys of every task. The keys below them are arguments of constructors.

The dataclass is read like any other constructor (signatures.py), so that `seed=abc` and
`model.depth=abc` are checked in the same way and get the same form of message.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TARGET = f"{__name__}.Config"
TRAINER_EXTRAS = f"{__name__}.TrainerExtras"
REPRODUCE = f"{__name__}.Reproduce"


@dataclass
class Config:
    """The top-level keys of a configuration."""

    task: str
    """Name of the task; the run folder is outputs/<task>/<date_time>."""
    level: str | None = None
    """What the task predicts (node, link, …), for tasks with several levels."""
    run: str = "train"
    """What to do: one of `MODES` (launch/modes)."""

    module: dict[str, Any] | None = None
    """The LightningModule; it is given those of `PARTS` that it takes."""
    model: dict[str, Any] | None = None
    """The network. Nulls below it are filled in from the data."""
    backbone: dict[str, Any] | None = None
    """The network into which `model` inserts attention, if it does."""
    attention: dict[str, Any] | None = None
    """The attention that is inserted; a mapping without keys means none."""
    encoder: dict[str, Any] | None = None
    """The part of `model` that reads the input, if it has one."""
    decoder: dict[str, Any] | None = None
    """The part of `model` that produces the output, if it has one."""
    data: dict[str, Any] | None = None
    """The LightningDataModule."""
    predict: dict[str, Any] | None = None
    """The LightningDataModule of run=predict, which reads `images`; or a callback for predictions
    of `data`. Without it, `data` is predicted, too."""
    export: dict[str, Any] | None = None
    """The `Export` by which run=export writes the module."""
    explain: dict[str, Any] | None = None
    """The `Report` of run=explain: what is explained, by which methods, and how they are tested."""
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    finetune: dict[str, Any] | None = None
    """A function of the model that chooses trained parameters and their learning rates."""
    distill: dict[str, Any] | None = None
    """The callback of distillation, which takes part if its `teacher` is not null."""
    trainer: dict[str, Any] | None = None
    """Arguments of lightning.Trainer and of `TrainerExtras`."""
    logger: dict[str, Any] | None = None
    callbacks: dict[str, Any] | None = None

    seed: int = 0
    seeds: int = 1
    """Number of runs, with seed, seed + 1, …, each in its own folder."""
    splits: int | Literal["all"] | None = None
    """Number of runs, with data.split=0, 1, …, each in its own folder."""
    run_dir: str | Path | None = None
    """The folder to write to, which must be new or empty."""
    init: str | Path | None = None
    """A run folder, checkpoint or other weights to start training from."""
    resume: str | Path | None = None
    """A run folder to continue in, or latest."""
    sweep: str | Path | None = None
    """The folder of a sweep, for run=retry and run=report."""
    ckpt: str | Path | None = None
    """A checkpoint, or a run folder, of which best.ckpt is read."""
    images: str | Path | None = None
    """An image or a folder for run=predict and run=explain, if the task has `predict`."""
    compile: bool | Literal["default", "reduce-overhead", "max-autotune"] = False
    """Whether to use torch.compile on the model, or its mode."""
    precision: str | int = 32
    """The precision of lightning.Trainer: 32, bf16-mixed, 16-mixed, …"""
    rank_logs: bool = False
    """Whether every further process of a run writes a log of its own: run_rank1.log, …"""
    allow: list[str] | None = None
    """Your own packages that the configuration may name; only on the command line."""
    vars: dict[str, Any] | None = None
    """Your own values for interpolations: dim: ${vars.dim}."""
    record: dict[str, Any] | None = None
    """The figure that an experiment reproduces (launch/records.py)."""
    reproduce: dict[str, Any] | None = None
    """The records that run=reproduce runs: arguments of `Reproduce`."""


@dataclass
class TrainerExtras:
    """Arguments of `trainer` beside those of lightning.Trainer."""

    limit_batches: int | float | None = None
    """A value for all limit_*_batches: a number of batches or a fraction."""
    minutes: int | float | None = None
    """Duration of a training, instead of max_epochs."""
    timeout_seconds: int | float | None = None
    """How long a process waits for the other processes of its run."""
    oom_retry: bool = True
    """Whether to try again with half the batch size if memory runs out."""


@dataclass
class Reproduce:
    """The settings of run=reproduce; without any, it lists the records."""

    name: str | list[str] | None = None
    """Names of records to run."""
    minutes: int | float | None = None
    """Time limit: run the shortest records that fit into it and whose data is available."""


# Nodes that are one object (and need a `_target_` if not null), in the order of checking.
OBJECTS = (
    "module", "model", "backbone", "attention", "encoder", "decoder", "data", "predict",
    "export", "explain", "optimizer", "scheduler", "finetune", "distill",
)  # fmt: skip

# The levels of each task that has several.
LEVELS = {
    "graph": ("node", "node_values", "link", "graph", "graph_values"),
    **dict.fromkeys(("vit", "spatial", "channel"), ("image", "image_values")),
}

# Keys that users write in the wrong place, and what to write instead.
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

# Objects that every run has unless null leaves them out, and what can be set of them.
BROUGHT: dict[str, dict[str, str]] = {
    "logger": {},
    "callbacks": {
        "safe": "nothing can be set",
        "accumulation": "nothing can be set",
        "last": "only callbacks.checkpoint.every_seconds is set",
    },
}

# Callbacks of earlier versions, and what replaces setting them to null.
FORMER = {
    "cost": "expected callbacks.steps.cost=false",
    "throughput": "expected callbacks.steps.throughput=false",
    "results": "every run writes results.json",
}

# Arguments of lightning.Trainer that are set by another key.
ELSEWHERE = {
    "logger": "logger.<name>",
    "callbacks": "callbacks.<name>",
    "precision": "precision",
    "default_root_dir": "run_dir",
    "enable_checkpointing": "callbacks.checkpoint",
}

# Arguments of lightning.Trainer that would have no effect here, or would disable a run's files.
UNUSED = {
    "model_registry": "it uploads checkpoints to a platform; a run keeps them in run_dir",
    "barebones": "it leaves out callbacks and checkpoints; to measure a step: run=bench",
}

# Allowed numbers, in words and as a test. lightning.Trainer does not check its own arguments: it
# fails later or ignores them.
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

# Nodes whose nulls are filled in with facts of the data.
FILLED = ("model", "module", "encoder", "decoder")

# Nodes that may contain nulls when the configuration is checked.
NULLABLE = (*FILLED, "predict")

# Parts that are passed to the module's constructor if it takes them.
PARTS = ("model", "optimizer", "scheduler", "finetune")

# Parts that are passed to the model's constructor if it takes them.
MODEL_PARTS = ("backbone", "attention", "encoder", "decoder")

# Keys that may change in a resumed run. The model does not depend on them.
RESUMABLE = (
    "trainer.",
    "callbacks.",
    "logger.",
    "data.num_workers",
    "data.root",
    "compile",
    "rank_logs",
)


def fill(node: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Replace nulls of a configuration by the facts of the same name."""
    node.update({k: deepcopy(facts[k]) for k, v in node.items() if v is None and k in facts})
