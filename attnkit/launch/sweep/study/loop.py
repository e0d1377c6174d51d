"""`-m hydra/sweeper=optuna`: a sweep whose trials Optuna chooses one after the other.

Its trials are the sweep's: same folders, states and locks, so that `-m resume=`, `run=retry` and
the table are those of every sweep. Several processes may run one study, in one sweep
(`-m resume=SWEEP_DIR` once more) or in sweeps of their own with the same storage.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override

from attnkit.launch.config.compose import Composer, quoted
from attnkit.launch.job import folder as folders
from attnkit.launch.job.decide import Request, decide
from attnkit.launch.job.job import Job
from attnkit.launch.sweep.launchers import BASIC, Launch
from attnkit.launch.sweep.record import Sweep, add_trial, key_of, read_sweep, write_sweep
from attnkit.launch.sweep.start import order_of, run_trials, sorted_out
from attnkit.launch.sweep.study import space
from attnkit.launch.sweep.study.settings import PREFIX, Settings
from attnkit.launch.sweep.trial import Order
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import replacing

if TYPE_CHECKING:
    from attnkit.launch.sweep.study.store import Store

NAME = "optuna"
BEST = "best.txt"
_CHECKPOINT = "callbacks.checkpoint"
# What may change in a study that goes on.
_CHANGEABLE = tuple(f"{PREFIX}{name}" for name in ("n_trials", "n_jobs", "storage"))


def is_changeable(override: str) -> bool:
    """Whether a study that goes on may have this setting."""
    return key_of(override) in _CHANGEABLE


def is_own(override: str) -> bool:
    """Whether it is a setting of the study, among Hydra's."""
    return key_of(override).startswith(("hydra/sweeper", PREFIX))


@dataclass
class _Plan:
    """A command line taken apart: what its trials share, and what is searched."""

    composer: Composer
    settings: Settings
    swept: list[Override]
    fixed: list[str]
    allow: list[str]
    space: dict[str, Any] = field(init=False)

    @classmethod
    def read(cls, composer: Composer, hydra: Sequence[str], rest: Sequence[str]) -> "_Plan":
        settings = Settings.read(composer, hydra)
        parsed = composer.parse(rest)
        swept = [o for o in parsed if o.is_sweep_override()]
        fixed = [o for o, p in zip(rest, parsed, strict=True) if p not in swept]
        allow = [o for o in fixed if key_of(o) == "allow"]
        fixed = [o for o in fixed if o not in allow]
        if settings.metric is not None:  # so that table, checkpoint and study agree
            mode = "min" if settings.direction == "minimize" else "max"
            fixed += [f"{_CHECKPOINT}.monitor={settings.metric}", f"{_CHECKPOINT}.mode={mode}"]
        return cls(composer, settings, swept, fixed, allow)

    def __post_init__(self) -> None:
        self.space = space.distributions(self.swept)

    def overrides(self, params: dict[str, Any]) -> list[str]:
        """Of a trial."""
        return [*self.fixed, *space.texts(params)]

    def check(self, root: Path) -> Job:
        """Check trials at the ends of the space; one of them."""
        for params in reversed(space.corners(self.space)):
            overrides = self.overrides(params)
            try:
                job = decide(Request.read(self.composer, [*overrides, *self.allow]), root / "trial")
            except UserError as error:
                lines = [*str(error).splitlines()[:2], f"  in the trial {' '.join(overrides)}"]
                raise UserError("\n".join(lines)) from error
        if job.config["run"] != "train":
            raise UserError(f"hydra/sweeper={NAME}: run={job.config['run']}; a study trains")
        monitor = _checkpoint(job.config).get("monitor")
        if not monitor or str(monitor).startswith("test"):
            raise UserError(
                f"{_CHECKPOINT}.monitor: {monitor}; a study needs a metric of validation there"
            )
        if self.settings.pruner != "none" and len(job.runs) > 1:
            raise UserError(
                f"{PREFIX}pruner={self.settings.pruner}: of trials of one run; "
                "leave seeds and splits out"
            )
        from attnkit.launch.sweep.study.store import make_pruner, make_sampler

        make_pruner(self.settings.pruner, self.settings.pruner_options)
        make_sampler(self.settings, 0)
        return job


def start(
    composer: Composer,
    overrides: Sequence[str],
    place: Sequence[str],
    hydra: Sequence[str],
    rest: Sequence[str],
) -> int:
    """Begin a study, or join the one that the storage holds; returns the exit code."""
    plan = _Plan.read(composer, hydra, rest)
    launch = _launch(composer, hydra, plan.settings)
    first = plan.overrides(space.corners(plan.space)[0])
    root = Request.read(composer, [*first, *plan.allow, *place]).folder(sweep=True)
    job = plan.check(root)
    if plan.settings.storage is not None:  # relative to where the command was typed
        hydra = [o for o in hydra if key_of(o) != f"{PREFIX}storage"]
        hydra = [*hydra, _override("storage", plan.settings.url(root))]
    root = folders.create(root, fresh=not root.exists())
    sweep = Sweep(
        root,
        tuple(overrides),
        tuple(o.key_or_group for o in plan.swept),
        sweeper=NAME,
        hydra=tuple(hydra),
        config_dir=str(composer.config_dir) if composer.config_dir else None,
        allow=tuple(plan.allow),
        working_dir=str(Path.cwd()),
    )
    write_sweep(sweep)
    typed = any(key_of(o) == f"{PREFIX}n_trials" for o in hydra)
    return _run(plan, launch, sweep, job, typed=typed)


def go_on(composer: Composer, sweep: Sweep, overrides: Sequence[str], launcher: list[str]) -> int:
    """Go on with a study; returns the exit code."""
    plan, job = _again(composer, sweep, overrides)
    launch = _launch(composer, launcher, plan.settings)
    typed = any(key_of(o) == f"{PREFIX}n_trials" for o in overrides)
    return _run(plan, launch, sweep, job, typed=typed)


def tell(composer: Composer, sweep: Sweep, overrides: Sequence[str]) -> None:
    """Tell the study of trials that were tried again, and show what is best after it."""
    plan, job = _again(composer, sweep, overrides)
    store = _open(plan, sweep.folder, job)
    with store.locked():
        store.settle(read_sweep(sweep.folder))
    _show_best(plan, store, sweep.folder)


def _again(composer: Composer, sweep: Sweep, overrides: Sequence[str]) -> tuple[_Plan, Job]:
    """The study's command as it was typed, with what is permitted and changed by this one."""
    changes = [o for o in overrides if is_changeable(o)]
    _, _, rest = sorted_out(sweep.command)
    allow = [o for o in overrides if key_of(o) == "allow"]
    rest = [*(o for o in rest if key_of(o) != "allow"), *allow]
    plan = _Plan.read(composer, [*filter(is_own, sweep.hydra), *changes], rest)
    path = plan.settings.file(sweep.folder)
    outside = path.parent != sweep.folder and not any("storage" in key_of(o) for o in changes)
    if outside and not (path.is_file() and path.stat().st_size):  # no file may have one made
        raise UserError(
            f"{PREFIX}storage: the study was in {path}, which is gone; give {PREFIX}storage"
        )
    return plan, plan.check(sweep.folder)


def _launch(composer: Composer, hydra: Sequence[str], settings: Settings) -> Launch:
    launch = Launch.read(composer, [o for o in hydra if not is_own(o)])
    if settings.n_jobs > 1 and launch.name == BASIC:
        raise UserError(
            f"{PREFIX}n_jobs={settings.n_jobs}: hydra/launcher={BASIC} runs one at a time\n"
            "  add hydra/launcher=joblib, or start further processes with -m resume=SWEEP_DIR"
        )
    return launch


def _open(plan: _Plan, folder: Path, job: Job) -> "Store":
    from attnkit.launch.sweep.study.store import Store

    checkpoint = _checkpoint(job.config)
    minimise = checkpoint.get("mode") != "max"
    monitor = str(checkpoint["monitor"])
    return Store(plan.settings, folder, monitor, minimise, plan.space, sorted(plan.fixed))


def _run(plan: _Plan, launch: Launch, sweep: Sweep, job: Job, *, typed: bool) -> int:
    folder, settings = sweep.folder, plan.settings
    store = _open(plan, folder, job)
    number = store.limit(settings.n_trials, typed=typed)
    print(f"a study of {number} trials in {folder}", flush=True)
    order = order_of(plan.composer, sweep, plan.allow, study=_pruning(store))
    tried: set[int] = set()

    def ask() -> list[int]:
        numbers = _next(plan, store, order, tried)
        tried.update(numbers)
        return numbers

    kept = [o for o in sweep.hydra if not is_own(o) or key_of(o) == f"{PREFIX}storage"]
    code = run_trials(launch, replace(sweep, hydra=tuple(kept)), order, ask)
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
                add_trial(folder, plan.overrides({k: asked.params[k] for k in plan.space}))
        sweep = read_sweep(folder)
        store.settle(sweep)
        wanted = [t for t in sweep.trials if t.state != "running" and order.wants(t)]
        numbers = [t.number for t in wanted if t.number not in tried][:most]
        number = len(sweep.trials)
        while len(numbers) < most and store.asked() < store.limit():
            add_trial(folder, plan.overrides(store.ask(number)))
            numbers.append(number)
            number += 1
    return numbers


def _pruning(store: "Store") -> tuple[str, ...]:
    """Overrides that give a trial the callback launch/sweep/study/pruning.py."""
    settings = store.settings
    if settings.pruner == "none":
        return ()
    inside = store.file.parent == store.folder  # and stays, when the sweep is moved
    url = f"${{run_dir}}/../{store.file.name}" if inside else settings.url(store.folder)
    if inside and settings.is_sqlite:
        url = f"sqlite:///{url}"
    values = {
        "_target_": "attnkit.launch.sweep.study.pruning.Pruning",
        "folder": "${run_dir}",
        "storage": url,
        "study": settings.study_name,
        "sweep": store.sweep,
        "monitor": store.monitor,
        "pruner": settings.pruner,
    }
    made = [f"++callbacks.pruning.{key}={quoted(value)}" for key, value in values.items()]
    for key, value in (settings.pruner_options or {}).items():
        made.append(f"++callbacks.pruning.options.{key}={_plain(value)}")
    return tuple(made)


def _show_best(plan: _Plan, store: "Store", folder: Path) -> None:
    """The best command line of the study, on screen and in a file."""
    if others := store.elsewhere():
        print(f"{others} of the study's trials are run by other sweeps")
    best = store.best()
    if best is None:
        return
    own = ["--config-dir", str(plan.composer.config_dir)] if plan.composer.config_dir else []
    words = [*own, *plan.allow, *plan.overrides({k: best.params[k] for k in plan.space})]
    command = " ".join(["attnkit", *map(shlex.quote, words)])
    with replacing(folder / BEST) as file:
        file.write(f"{command}\n".encode())
    print(f"  best   {store.monitor} {best.value!r}: {folder / BEST}\n{command}")


def _checkpoint(config: dict[str, Any]) -> dict[str, Any]:
    return (config.get("callbacks") or {}).get("checkpoint") or {}


def _override(name: str, value: str) -> str:
    return f"{PREFIX}{name}={quoted(value)}"


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return quoted(value) if isinstance(value, str) else repr(value)
