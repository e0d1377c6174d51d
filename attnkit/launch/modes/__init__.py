"""The modes of a run: for each value of `run=` what it needs, what it uses and what it does.

A new mode is one entry of `MODES`. What a mode does not use is refused when it is typed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from attnkit.core.nearest import nearest
from attnkit.lightning.errors import UserError

_ALWAYS = frozenset({"run", "task", "experiment", "allow", "vars"})
_MODEL = frozenset({
    "module", "model", "backbone", "attention", "encoder", "decoder", "finetune",
})  # fmt: skip
_OBJECTS = _MODEL | {"data", "trainer", "callbacks", "run_dir", "seed", "compile", "precision"}
_TRAINING = _OBJECTS | {
    "optimizer", "scheduler", "logger", "init", "seeds", "splits", "resume", "rank_logs",
}  # fmt: skip

# Arguments of the trainer that only training reads.
_FIT = frozenset({
    "accumulate_grad_batches", "check_val_every_n_epoch", "gradient_clip_algorithm",
    "gradient_clip_val", "limit_train_batches", "limit_val_batches", "log_every_n_steps",
    "max_epochs", "max_steps", "max_time", "min_epochs", "min_steps", "num_sanity_val_steps",
    "oom_retry", "overfit_batches", "reload_dataloaders_every_n_epochs", "val_check_interval",
})  # fmt: skip
_UNTIMED = (_FIT - {"accumulate_grad_batches", "gradient_clip_algorithm", "gradient_clip_val",
                    "max_steps", "limit_train_batches", "overfit_batches"}) | {
    "limit_test_batches", "limit_predict_batches",
}  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """One mode of a run.

    Args:
        name: the value of `run=`.
        uses: the top-level keys of the configuration it reads, beside those all modes read.
        work: dotted name of the function that does it, given a `Run` (launch/run.py), and
            returns the figures for results.json.
        command: dotted name of the function that carries the command line out, given a `Request`
            (launch/decide.py) and the launcher of ranks or None, and returns the exit code.
        stage: of Lightning, `fit`, `test` or `predict`: callbacks with hooks of it take part.
        rules: dotted name of a function that refuses what else is wrong, given a `Request`.
        needs_ckpt: whether `ckpt` must be there.
        leaves: arguments of the trainer it does not read.
        in_sweeps: whether `-m` runs several of them.
        has_table: whether its work shows a table of its own, in the place of that of the figures.
    """

    name: str
    uses: frozenset[str]
    work: str = ""
    command: str = "attnkit.launch.several.command"
    stage: str = ""
    rules: str = ""
    needs_ckpt: bool = False
    leaves: frozenset[str] = frozenset()
    in_sweeps: bool = True
    has_table: bool = False

    @property
    def trains(self) -> bool:
        """Whether it trains a run to its end, which may be resumed."""
        return self.stage == "fit"

    def reads(self, key: str) -> bool:
        """Whether a top-level key means something to it."""
        return key in self.uses or key in _ALWAYS


MODES = {
    mode.name: mode
    for mode in (
        Mode(
            "train",
            _TRAINING,
            work="attnkit.launch.modes.train.train",
            stage="fit",
            leaves=frozenset({"limit_predict_batches"}),
        ),
        Mode(
            "check",
            _TRAINING - {"resume"},  # it is given the command of the training
            command="attnkit.launch.measure.check.command",
            in_sweeps=False,
        ),
        Mode(
            "bench",
            _OBJECTS | {"optimizer", "scheduler"},
            work="attnkit.launch.measure.bench.work",
            leaves=_UNTIMED,
            in_sweeps=False,
        ),
        Mode(
            "test",
            _OBJECTS | {"logger", "ckpt", "rank_logs"},
            work="attnkit.launch.modes.test.test",
            stage="test",
            needs_ckpt=True,
            leaves=_FIT | {"limit_predict_batches"},
        ),
        Mode(
            "predict",
            _OBJECTS | {"predict", "ckpt", "images", "rank_logs"},
            work="attnkit.launch.modes.predict.predict",
            stage="predict",
            rules="attnkit.launch.modes.rules.predict",
            needs_ckpt=True,
            leaves=_FIT | {"limit_test_batches"},
        ),
        Mode(
            "explain",
            _MODEL | {"explain", "data", "predict", "ckpt", "images", "run_dir", "seed"},
            work="attnkit.launch.modes.explain.explain",
            rules="attnkit.launch.modes.rules.explain",
            has_table=True,
        ),
        Mode(
            "export",
            _MODEL | {"export", "ckpt", "run_dir"},
            work="attnkit.launch.modes.export.export",
            rules="attnkit.launch.modes.rules.export",
            needs_ckpt=True,
        ),
        Mode(
            "retry",
            # of the trials may change what a run that goes on may change
            frozenset({"sweep", "trainer", "callbacks", "logger", "data", "compile", "rank_logs"}),
            command="attnkit.launch.sweep.start.retry",
            in_sweeps=False,
        ),
        Mode(
            "report",
            frozenset({"sweep"}),
            command="attnkit.launch.sweep.report.report",
            in_sweeps=False,
        ),
        Mode(
            "reproduce",
            # of data only the root: a record is run as it is
            frozenset({"reproduce", "record", "data", "seeds", "run_dir"}),
            command="attnkit.launch.records.reproduce.command",
            in_sweeps=False,
        ),
    )
}


def mode_of(name: Any) -> Mode:
    """The mode of this name.

    Raises:
        UserError: there is none.
    """
    if name not in MODES:
        modes = ", ".join(MODES)
        raise UserError(f"run: expected one of {modes}, got {name!r}{nearest(name, MODES)}")
    return MODES[name]


def named(dotted: str) -> Callable[..., Any]:
    """The function that a mode names; imported only now, since most need torch."""
    module, _, name = dotted.rpartition(".")
    return getattr(import_module(module), name)
