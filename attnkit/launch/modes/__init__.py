"""The modes of a run: for each value of `run=`, what it needs, what it uses and what it does.

A new mode is one entry of `MODES`. Settings that a mode does not use are refused when typed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from attnkit.core.names import nearest
from attnkit.lightning.errors import UserError

_ALWAYS = frozenset({"run", "task", "level", "experiment", "allow", "vars"})
_MODEL = frozenset({
    "module", "model", "backbone", "attention", "encoder", "decoder", "finetune",
})  # fmt: skip
_OBJECTS = _MODEL | {"data", "trainer", "callbacks", "run_dir", "seed", "compile", "precision"}
_TRAINING = _OBJECTS | {
    "optimizer", "scheduler", "distill", "logger", "init", "seeds", "splits", "resume",
    "rank_logs",
}  # fmt: skip

_BENCH = _OBJECTS | {"optimizer", "scheduler"}
_TEST = _OBJECTS | {"logger", "ckpt", "rank_logs"}
_PREDICT = _OBJECTS | {"predict", "ckpt", "images", "rank_logs"}
_EXPLAIN = _MODEL | {"explain", "data", "predict", "ckpt", "images", "run_dir", "seed"}
# the keys that may change in a resumed run may also change in a trial that is run again
_RETRY = frozenset({"sweep", "trainer", "callbacks", "logger", "data", "compile", "rank_logs"})
# below data only the root may be set, since a record is run as it is
_REPRODUCE = frozenset({"reproduce", "record", "data", "seeds", "run_dir"})

# Arguments of the trainer that only training reads.
_FIT = frozenset({
    "accumulate_grad_batches", "check_val_every_n_epoch", "gradient_clip_algorithm",
    "gradient_clip_val", "limit_train_batches", "limit_val_batches", "log_every_n_steps",
    "max_epochs", "max_steps", "max_time", "min_epochs", "min_steps", "minutes",
    "num_sanity_val_steps", "oom_retry", "overfit_batches", "reload_dataloaders_every_n_epochs",
    "val_check_interval",
})  # fmt: skip
_OF_TRAINING = frozenset({"limit_predict_batches"})
_UNTIMED = (_FIT - {"accumulate_grad_batches", "gradient_clip_algorithm", "gradient_clip_val",
                    "max_steps", "limit_train_batches", "overfit_batches"}) | {
    "limit_test_batches", "limit_predict_batches",
}  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """One mode of a run.

    Args:
        name: the value of `run=`.
        uses: the top-level keys that it reads, in addition to those that all modes read.
        function: dotted name of its function, which takes a `Run` (launch/run.py) and returns the
            numbers for results.json.
        is_run: whether it leaves a run folder. If not, its function takes a `Request`
            (launch/decide.py) and the launcher of ranks or None, and returns the exit code.
        stage: Lightning's stage, `fit`, `test` or `predict`. Callbacks with its hooks take part.
        needs_ckpt: whether `ckpt` is required.
        rules: dotted name of a function that takes a `Request` and refuses other wrong settings.
        ignores: arguments of the trainer that it does not read.
        in_sweeps: whether `-m` may run it several times, if it is a run.
        has_table: whether it prints a table of its own instead of that of the results.
    """

    name: str
    uses: frozenset[str]
    function: str
    is_run: bool = True
    stage: str = ""
    needs_ckpt: bool = False
    rules: str = ""
    ignores: frozenset[str] = frozenset()
    in_sweeps: bool = True
    has_table: bool = False

    @property
    def trains(self) -> bool:
        """Whether it trains a run to its end, so that the run can be resumed."""
        return self.stage == "fit"

    def reads(self, key: str) -> bool:
        """Return whether the mode reads a top-level key."""
        return key in self.uses or key in _ALWAYS


_L, _RULES = "attnkit.launch", "attnkit.launch.modes.rules"
MODES = {
    mode.name: mode
    for mode in (
        Mode("train", _TRAINING, f"{_L}.modes.train.train", stage="fit", ignores=_OF_TRAINING),
        # takes the same settings as the training that it checks
        Mode("check", _TRAINING - {"resume"}, f"{_L}.modes.check.command", is_run=False),
        Mode("bench", _BENCH, f"{_L}.modes.bench.work", ignores=_UNTIMED, in_sweeps=False),
        Mode("test", _TEST, f"{_L}.modes.trained.test", stage="test", needs_ckpt=True,
             ignores=_FIT | {"limit_predict_batches"}),
        Mode("predict", _PREDICT, f"{_L}.modes.trained.predict", stage="predict", needs_ckpt=True,
             rules=f"{_RULES}.predict", ignores=_FIT | {"limit_test_batches"}),
        Mode("explain", _EXPLAIN, f"{_L}.modes.explain.explain", rules=f"{_RULES}.explain",
             has_table=True),
        Mode("export", _MODEL | {"export", "ckpt", "run_dir"}, f"{_L}.modes.trained.export",
             needs_ckpt=True, rules=f"{_RULES}.export"),
        Mode("retry", _RETRY, f"{_L}.sweep.start.retry", is_run=False),
        Mode("report", frozenset({"sweep"}), f"{_L}.sweep.report.report", is_run=False),
        Mode("reproduce", _REPRODUCE, f"{_L}.reproduce.command", is_run=False),
    )
}  # fmt: skip


def mode_of(name: Any) -> Mode:
    """Return the mode of this name.

    Raises:
        UserError: there is no such mode.
    """
    if name not in MODES:
        modes = ", ".join(MODES)
        raise UserError(f"run: expected one of {modes}, got {name!r}{nearest(name, MODES)}")
    return MODES[name]


def named(dotted: str) -> Callable[..., Any]:
    """Import and return the function that a mode names; most of them import torch."""
    module, _, name = dotted.rpartition(".")
    return getattr(import_module(module), name)
