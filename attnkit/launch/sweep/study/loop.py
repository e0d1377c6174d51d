"""`-m hydra/sweeper=optuna`: a sweep whose trials Optuna chooses one after the other.

Its trials are the sweep's: same folders, states and locks, so that `-m resume=`, `run=retry` and
the table are those of every sweep. Several processes may run one study, in sweeps of their own with
the same storage.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnkit.launch import folder as folders
from attnkit.launch.command import command_line, key_of, permission, quoted
from attnkit.launch.config.compose import Composer
from attnkit.launch.config.hydra_words import SUBDIR, is_launcher, is_sweeper, split, trial_folder
from attnkit.launch.decide import Job, Request
from attnkit.launch.sweep.launchers import BASIC, Launch
from attnkit.launch.sweep.record import Sweep, add_trial, held, read_sweep
from attnkit.launch.sweep.report import best_command
from attnkit.launch.sweep.run_trials import begin, check_trial, order_of, run_trials
from attnkit.launch.sweep.study import space
from attnkit.launch.sweep.study.settings import JOURNAL, PREFIX, Settings
from attnkit.launch.sweep.trial import Order
from attnkit.lightning.callbacks.study import make_pruner, open_storage
from attnkit.lightning.console import three_digits
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import write_text

if TYPE_CHECKING:
    from attnkit.launch.sweep.study.store import Store

NAME = "optuna"
BEST = "best.txt"
_CHECKPOINT = "callbacks.checkpoint"
# What may change in a study that goes on.
_CHANGEABLE = tuple(f"{PREFIX}{name}" for name in ("n_trials", "n_jobs", "storage"))


def is_chosen(words: Sequence[str]) -> bool:
    """Whether Hydra's words choose a study.

    Raises:
        UserError: they choose another sweeper, or set something of one that is not chosen.
    """
    chosen = any(word.lstrip("+") == f"hydra/sweeper={NAME}" for word in words)
    for word in filter(is_sweeper, words):
        known = word.lstrip("+") in ("hydra/sweeper=basic", f"hydra/sweeper={NAME}")
        if not known and not (chosen and key_of(word).startswith(PREFIX)):
            raise UserError(
                f"{word}: attnkit makes the combinations itself, of key=a,b\n"
                "  hydra/sweeper=basic: all of them; optuna: a study, with hydra.sweeper.*"
            )
    return chosen


def is_changeable(word: str) -> bool:
    """Whether a study that goes on may have this setting."""
    return key_of(word) in _CHANGEABLE


class _Plan:
    """A command line taken apart: what its trials share, and what is searched."""

    def __init__(self, composer: Composer, words: Sequence[str], rest: Sequence[str]) -> None:
        self.composer, self.words = composer, list(words)
        self.settings = Settings.read(composer, words)
        parsed = composer.parse(rest)
        self.swept = [o for o in parsed if o.is_sweep_override()]
        self.space = space.distributions(self.swept)
        fixed = [o for o, p in zip(rest, parsed, strict=True) if p not in self.swept]
        self.allow = [o for o in fixed if key_of(o) == "allow"]
        self.fixed = [o for o in fixed if o not in self.allow]
        if self.settings.metric is not None:  # so that table, checkpoint and study agree
            modes = {"minimize": "min", "maximize": "max", None: "null"}
            mode = modes[self.settings.direction]
            self.fixed.append(f"{_CHECKPOINT}.monitor={self.settings.metric}")
            self.fixed.append(f"{_CHECKPOINT}.mode={mode}")

    def overrides(self, params: dict[str, Any]) -> list[str]:
        """Of a trial."""
        return [*self.fixed, *space.texts(params)]

    def add(self, folder: Path, number: int, params: dict[str, Any]) -> None:
        """Put a trial on record."""
        overrides = self.overrides(params)
        name = trial_folder(self.composer, self.words, overrides, number)
        add_trial(folder, overrides, name)

    def check(self, root: Path) -> Job:
        """Check trials at the ends of the space; one of them."""
        for params in reversed(space.corners(self.space)):
            job = check_trial(self.composer, [*self.overrides(params), *self.allow], root)
        if job.config["run"] != "train":
            raise UserError(f"hydra/sweeper={NAME}: run={job.config['run']}; a study trains")
        monitor = _checkpoint(job.config).get("monitor")
        if not monitor or str(monitor).startswith("test"):
            raise UserError(
                f"{_CHECKPOINT}.monitor: {monitor}; a study needs a validation metric there"
            )
        if self.settings.pruner != "none" and len(job.runs) > 1:
            raise UserError(
                f"{PREFIX}pruner={self.settings.pruner}: works only if each trial is "
                "one run; leave out seeds and splits"
            )
        from attnkit.launch.sweep.study.store import make_sampler

        make_pruner(self.settings.pruner, self.settings.pruner_options)
        make_sampler(self.settings, 0)
        return job


def start(
    composer: Composer,
    rest: Sequence[str],
    place: Sequence[str],
    words: Sequence[str],
    begun: Callable[[Path], None],
) -> int:
    """Begin a study, or join the one that the storage holds; returns the exit code.

    Args:
        rest: the overrides without `run_dir`.
        place: `run_dir`, if it was given.
        words: Hydra's.
        begun: told the folder of the sweep, before its trials run.
    """
    plan = _Plan(composer, words, rest)
    launch = _launch(composer, words, plan.settings)
    first = plan.overrides(space.corners(plan.space)[0])
    for word in words:
        if key_of(word) == SUBDIR and "job.num" not in word:
            raise UserError(
                f"{word}: a study may choose the same values twice\n"
                "  with ${hydra.job.num} in it, each trial has a folder of its own"
            )
    trial_folder(composer, words, first, 0)
    request = Request.read(composer, [*first, *plan.allow, *place])
    root = request.folder(sweep=True)
    job = plan.check(root)
    if plan.settings.storage is not None:
        # what is wrong with it is said before there is a folder
        open_storage(plan.settings.url(root), make=True)
    root = folders.create(root, fresh=request.config.get("run_dir") is None)
    keys = [o.key_or_group for o in plan.swept]
    begun(root)
    with held(root):
        sweep = begin(composer, root, (*rest, *place), words, keys, sweeper=NAME)
        return _run(plan, launch, sweep, _open(plan, root, job), words)


def go_on(composer: Composer, sweep: Sweep, allow: Sequence[str], words: Sequence[str]) -> int:
    """Go on with a study; returns the exit code."""
    plan, store = _again(composer, sweep, allow, words)
    return _run(plan, _launch(composer, words, plan.settings), sweep, store, words)


def tell(composer: Composer, sweep: Sweep, allow: Sequence[str]) -> None:
    """Tell the study of trials that were tried again, and show what is best after it."""
    plan, store = _again(composer, sweep, allow, ())
    with store.locked():
        store.settle(read_sweep(sweep.folder))
    _show_best(plan, store, sweep.folder)


def _again(
    composer: Composer, sweep: Sweep, allow: Sequence[str], words: Sequence[str]
) -> tuple[_Plan, "Store"]:
    """The study's command as it was typed, with what is permitted and changed by this one."""
    changes = [w for w in words if is_changeable(w)]
    rest = [o for o in split(sweep.command)[0] if key_of(o) not in ("allow", "run_dir")]
    plan = _Plan(composer, [*sweep.hydra, *changes], [*rest, *allow])
    # No file may have a storage made: one that is elsewhere has to be there, or typed.
    elsewhere = plan.settings.storage is not None and not any("storage" in w for w in changes)
    return plan, _open(plan, sweep.folder, plan.check(sweep.folder), make=not elsewhere)


def _launch(composer: Composer, words: Sequence[str], settings: Settings) -> Launch:
    launch = Launch.read(composer, words)
    if settings.n_jobs > 1 and launch.is_basic:
        raise UserError(
            f"{PREFIX}n_jobs={settings.n_jobs}: hydra/launcher={BASIC} runs one at a time\n"
            "  add hydra/launcher=joblib, which runs several"
        )
    return launch


def _open(plan: _Plan, folder: Path, job: Job, *, make: bool = True) -> "Store":
    from attnkit.launch.sweep.study.store import Store

    checkpoint = _checkpoint(job.config)
    minimise = checkpoint.get("mode") != "max"
    monitor = str(checkpoint["monitor"])
    return Store(plan.settings, folder, monitor, minimise, plan.space, sorted(plan.fixed), make)


def _run(plan: _Plan, launch: Launch, sweep: Sweep, store: "Store", words: Sequence[str]) -> int:
    folder = sweep.folder
    typed = any(key_of(word) == f"{PREFIX}n_trials" for word in words)
    there = store.asked()
    number = store.limit(plan.settings.n_trials, typed=typed)
    print(f"a study of {number} trials in {folder}", flush=True)
    if number < there:
        print(f"{PREFIX}n_trials={number}: it has {there} already; no further one is chosen")
    order = order_of(plan.composer, sweep, plan.allow, study=_pruning(store, plan.words))
    tried: set[int] = set()

    def ask() -> list[int]:
        numbers = _next(plan, store, order, tried)
        tried.update(numbers)
        return numbers

    launcher = [w for w in words if is_launcher(w)]
    kept = [w for w in sweep.hydra if not is_launcher(w)]
    code = run_trials(launch, replace(sweep, hydra=(*kept, *launcher)), order, iter(ask, []))
    with store.locked():
        store.settle(read_sweep(folder))
    _show_best(plan, store, folder)
    return code


def _next(plan: _Plan, store: "Store", order: Order, tried: set[int]) -> list[int]:
    """What to run: trials that were broken off, then those that Optuna chooses."""
    folder, most = store.folder, plan.settings.n_jobs
    with store.locked():
        there = len(read_sweep(folder).trials)
        for number, asked in sorted(store.of_sweep().items()):
            if number >= there:  # its process was killed before it could write it down
                plan.add(folder, number, {k: asked.params[k] for k in plan.space})
        sweep = read_sweep(folder)
        store.settle(sweep)
        wanted = [t for t in sweep.trials if t.state != "running" and order.wants(t)]
        numbers = [t.number for t in wanted if t.number not in tried][:most]
        number = len(sweep.trials)
        while len(numbers) < most and store.asked() < store.limit():
            plan.add(folder, number, store.ask(number))
            numbers.append(number)
            number += 1
    return numbers


def _pruning(store: "Store", words: Sequence[str]) -> tuple[str, ...]:
    """Overrides that give a trial the callback `Pruning`."""
    settings = store.settings
    if settings.pruner == "none":
        return ()
    # In the sweep's folder it stays where it is when the sweep is moved.
    values = {
        "_target_": "attnkit.lightning.Pruning",
        "folder": "'${run_dir}'",
        "storage": quoted(store.url) if settings.storage else f"'${{run_dir}}/../{JOURNAL}'",
        "study": quoted(settings.study_name),
        "sweep": quoted(store.sweep),
        "monitor": quoted(store.monitor),
        "pruner": settings.pruner,
    }
    own = f"{PREFIX}pruner_options"
    options = [w.lstrip("+").removeprefix(own) for w in words if key_of(w).startswith(own)]
    return (
        *(f"++callbacks.pruning.{key}={value}" for key, value in values.items()),
        *(f"++callbacks.pruning.options{option}" for option in options),
    )


def _show_best(plan: _Plan, store: "Store", folder: Path) -> None:
    """The best command line of the study, on screen and in a file."""
    best = store.best()
    if best is None or best.value is None:
        return
    words = plan.overrides({k: best.params[k] for k in plan.space})
    line = command_line(*words, permission=permission(plan.composer.config_dir, plan.allow))
    write_text(folder / BEST, f"{line}\n")
    print(f"  best   {store.monitor} {three_digits(best.value)}: {folder / BEST}")
    if line != best_command(folder):  # that of another sweep in the same study
        print(f"the best run of the study:\n  {line}")


def _checkpoint(config: dict[str, Any]) -> dict[str, Any]:
    return (config.get("callbacks") or {}).get("checkpoint") or {}
