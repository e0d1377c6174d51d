"""Turns a command line into a checked job, before torch is imported or anything is written."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attnkit.launch import folder as folders
from attnkit.launch.command import command_line, dotted_key, literal, permission
from attnkit.launch.config import schema
from attnkit.launch.config.compose import Composer, task_config
from attnkit.launch.config.files import Origins, Source
from attnkit.launch.config.permission import Consent, allowed_by
from attnkit.launch.config.validate import validate
from attnkit.launch.modes import Mode, mode_of, named
from attnkit.launch.modes.rules import check_uses
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import absolute

# Keys that control what is done with a saved run. Their values there are never used again.
CONTROLS = {
    "run": "train",
    "seeds": 1,
    "splits": None,
    "init": None,
    "resume": None,
    "sweep": None,
    "ckpt": None,
    "images": None,
    "allow": None,
}


@dataclass(frozen=True)
class Request:
    """A command line: its composed configuration, and where each key was written."""

    composer: Composer
    overrides: Sequence[str]
    config: DictConfig
    origins: Origins
    consent: Consent
    words: Sequence[str] = ()
    """Hydra's own settings, for a sweep."""
    base: Path | None = None
    """The config.yaml of an earlier run, which replaces the shipped configuration."""

    @classmethod
    def read(
        cls,
        composer: Composer,
        overrides: Sequence[str],
        words: Sequence[str] = (),
        base: Path | None = None,
    ) -> "Request":
        for override in composer.parse(overrides):
            if override.is_sweep_override():
                raise UserError(
                    f"{override.input_line}: several values\n"
                    "  one run for each: add -m; one list: key=[a,b]; a text: 'key=\"a,b\"'"
                )
        config = task_config(composer.compose(overrides))
        consent = Consent(allowed_by(overrides, config), composer.config_dir)
        consent.make_importable()
        origins = Origins(overrides, lambda: composer.files(overrides))
        return cls(composer, overrides, config, origins, consent, words, base)

    def typed(self, key: str) -> str:
        """Return the override that sets exactly this key, or an empty text."""
        return next((o for o in self.overrides if o.lstrip("+").startswith(f"{key}=")), "")

    @property
    def mode(self) -> Mode:
        return mode_of(self.config.get("run"))

    @property
    def permission(self) -> tuple[str, ...]:
        """The words of the command line that permit code, for commands printed to the user."""
        allow = [o for o in self.overrides if o.lstrip("+").startswith("allow=")]
        return permission(self.composer.config_dir, allow)

    def folder(self, *, sweep: bool = False) -> Path:
        """Return the folder to write to, without creating it."""
        known = not OmegaConf.is_missing(self.config, "task")
        task = Path(str(self.config["task"])).name if known else ""
        name = self.composer.job_name or task or "task"
        return folders.plan(self.config.get("run_dir"), name, sweep=sweep)

    def on(self, path: Path, config: DictConfig) -> "Request":
        """Return this request with a configuration that is based on a saved run's."""
        source = Source(path, "")
        return replace(self, config=config, origins=Origins(self.overrides, lambda: [source]))

    def check(self, rules: Callable[["Request"], None]) -> None:
        """Check the rules of a mode, which read unresolved values."""
        try:
            rules(self)
        except OmegaConfBaseException:  # a reference leads nowhere
            self.plain(self.config)  # raises an error that names the key
            raise

    def plain(self, config: DictConfig, **values: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the configuration with these values, resolved and checked, and allowed packages.

        The second result holds those packages of the user that the configuration may name.
        """
        if values:
            config = config.copy()
        for key, value in values.items():
            OmegaConf.update(config, key, literal(value), force_add=True)
        plain = self.composer.plain(config, self.origins)
        # before validate, which reads the source of the named classes
        allow = self.consent.check(plain, self.origins)
        validate(plain, self.origins)
        return {**plain, "allow": None}, allow  # a file must not grant permission


@dataclass
class Job:
    """One command: the run folder, its configuration, and one resolved configuration per seed."""

    folder: Path
    config: dict[str, Any]
    runs: list[dict[str, Any]]
    fresh: bool = False
    """Whether attnkit chose the folder's name, and may choose another one if it is taken."""
    trial: bool = False
    """Whether it is a trial of a sweep; its folder may hold logs and errors of failed attempts."""
    callbacks: tuple[str, ...] = ()
    """Names of callbacks that the command line mentions."""
    command: str = ""
    """The command as it was typed."""
    permission: tuple[str, ...] = ()
    """The words of the command line that permit code: --config-dir and allow=."""
    allow: tuple[str, ...] = ()
    """The user's own packages that the configuration may name."""
    paths: tuple[str, ...] = ()
    """Folders of the user's own modules."""
    alone: bool = False
    """Whether the checkpoint has no run folder, so that everything comes from the checkpoint."""
    resumed: bool = False
    changes: tuple[str, ...] = ()
    """Overrides given together with resume=."""
    begun: bool = False
    """Whether all objects of the first run have been built and its folder has been written."""

    @property
    def mode(self) -> Mode:
        return mode_of(self.config["run"])


def decide(request: Request, run_dir: Path | None = None) -> Job:
    """Return the job that a command line asks for; `run_dir` is the folder of a sweep's trial."""
    mode = request.mode
    if run_dir is not None:
        request.config["run_dir"] = literal(str(run_dir))
        if not (mode.is_run and mode.in_sweeps):
            raise UserError(f"run={mode.name}: not with -m; one configuration at a time")
    if request.config.get("resume") is not None:
        return _resumed(request)
    request.check(check_uses)
    fresh = request.config.get("run_dir") is None
    is_of_checkpoint = request.config.get("ckpt") is not None and "ckpt" in mode.uses
    home = None
    if is_of_checkpoint:
        request, home = _of_checkpoint(request)
    elif request.base is not None:
        request = _on_base(request, request.base)
    config = request.config
    if config.get("init") is not None:
        config["init"] = literal(folders.initial(str(config["init"])))
    teacher = (config.get("distill") or {}).get("teacher")
    if teacher is None and not request.typed("distill.teacher"):  # a sweep's trial may set null
        for typed in request.overrides:
            if dotted_key(typed).partition(".")[0] == "distill":
                raise UserError(
                    f"{typed}: has no effect without distill.teacher\n"
                    "  add distill.teacher=RUN_DIR, a checkpoint or a name of timm"
                )
    if teacher is not None and _is_path(str(teacher)):  # timm checks its own names
        config["distill"]["teacher"] = literal(
            str(folders.checkpoint(str(teacher), "distill.teacher"))
        )
    folder = run_dir or request.folder()
    config["run_dir"] = literal(str(folder))
    if mode.rules:
        request.check(named(mode.rules))
    top, allow = request.plain(config)
    runs = [
        request.plain(config, run_dir=str(folder / name), **values)[0]
        for name, values in _parts(top).items()
    ]
    alone = is_of_checkpoint and home is None
    trial = run_dir is not None
    return _job(request, folder, [top, *runs], allow, fresh=fresh, trial=trial, alone=alone)


def _is_path(given: str) -> bool:
    """Return whether a teacher is a path: an existing one, or a text that can't be a timm name."""
    looks_like_path = "/" in given.removeprefix("./") or given.endswith(".ckpt")
    return absolute(given).exists() or (looks_like_path and not given.startswith("hf-hub:"))


def _job(
    request: Request,
    folder: Path,
    configs: list[dict[str, Any]],
    allow: tuple[str, ...],
    **kwargs: Any,
) -> Job:
    """Return the job of these configurations: that of the job, then one for each of its runs."""
    consent, given = request.consent, ("--config", str(request.base)) if request.base else ()
    allowed = permission(request.composer.config_dir, ())
    return Job(
        folder,
        configs[0],
        configs[1:] or configs,
        callbacks=_callbacks(request, configs[0]),
        command=command_line(*given, *request.overrides, permission=allowed),
        permission=request.permission,
        allow=allow,
        paths=(str(consent.folder),) if consent.folder else (),
        **kwargs,
    )


def _parts(top: dict[str, Any], *, resumed: bool = False) -> dict[str, dict[str, Any]]:
    """Return the folder of each seed or split of a job, and the values that differ there.

    A job of a single run has none. `all` is replaced by the number of splits, so that a resumed job
    knows it.
    """
    splits = top.get("splits")
    if splits is not None:
        data = top.get("data") or {}
        if "split" not in data:
            raise UserError("splits: the data has no split to choose (data.split)")
        available = data.get("num_splits")
        if available is None and not resumed:
            available = _num_splits(data)
        splits = available if splits == "all" else splits
        if splits is None:
            raise UserError(
                "splits=all: the number of splits is unknown, since the data has no num_splits\n"
                "  splits=N runs data.split=0 to N - 1"
            )
        if available is not None and splits > available:
            raise UserError(f"splits={splits}: the data has {available}")
        top["splits"] = splits
        return {f"split_{i}": {"data.split": i, "splits": None} for i in range(splits)}
    if top["seeds"] > 1:
        seeds = range(top["seed"], top["seed"] + top["seeds"])
        return {f"seed_{seed}": {"seed": seed, "seeds": 1} for seed in seeds}
    return {}


def _num_splits(node: Mapping[str, Any]) -> int | None:
    """Read the data and return its number of fixed splits; None if it has no `num_splits`."""
    from attnkit.launch import console  # imports torch
    from attnkit.lightning.build import build

    console.quiet()
    data = build(node, at="data")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run of each split shows them
        data.prepare_data()
        return getattr(data, "num_splits", None)


def _callbacks(request: Request, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return names of callbacks whose settings were typed, or that a typed choice adds."""
    keys = [dotted_key(override).split(".") for override in request.overrides]
    names = {key[1] for key in keys if key[0] == "callbacks" and len(key) > 1}
    if ["callbacks"] in keys:
        usual = request.composer.compose([f"task={config['task']}"])
        names |= set(config.get("callbacks") or {}) - set(usual["callbacks"])
    return tuple(sorted(names))


def _on_base(request: Request, base: Path) -> Request:
    """Return a request for a new run with the configuration of an earlier one and the overrides.

    Values that came from the earlier data are reset, since the new run may read other data.
    """
    changes = {k: v for k, v in CONTROLS.items() if k not in ("init", "seeds", "splits")}
    saved = folders.read_config(base)
    for key in folders.origin(base.parent).get("from_data", []):
        *parts, name = str(key).split(".")
        node: Any = saved
        for part in parts:
            node = node.get(part) or {}
        if name in node:
            node[name] = None if len(parts) == 1 else "auto"
    (saved.get("callbacks") or {}).pop("pruning", None)  # it works only inside a study
    return _on_saved(request, base, saved, changes)


def _of_checkpoint(request: Request) -> tuple[Request, Path | None]:
    """Return the request with the configuration of the checkpoint's run, and that run's folder.

    If the checkpoint lies in no run folder, the configuration stays as it is and the folder is
    None.
    """
    given = request.config
    ckpt = folders.checkpoint(str(given["ckpt"]))
    home = folders.run_of(ckpt)
    if home is None:
        _check_alone(request, ckpt)
    else:
        saved = folders.read_config(home / folders.CONFIG)
        # A training on a part of the data is still tested on all of it.
        saved["trainer"] = {**(saved.get("trainer") or {}), "limit_batches": None}
        explain = given.get("explain")  # like CONTROLS, not taken from the saved run
        explain = explain and OmegaConf.to_container(explain, resolve=False)
        changes = {**CONTROLS, "explain": explain}
        request = _on_saved(request, home / folders.CONFIG, saved, changes)
    request.config["ckpt"] = literal(str(ckpt))
    return request, home


def _on_saved(
    request: Request, path: Path, saved: dict[str, Any], changes: Mapping[str, Any]
) -> Request:
    """Return the request with a saved configuration, its paths moved to the new run folder."""
    old = literal(str(saved.get("run_dir") or path.parent))
    saved = folders.relocate(literal(saved), Path(old), Path("${run_dir}"))
    saved |= {**changes, "run_dir": literal(request.config["run_dir"])}
    return request.on(path, request.composer.overlay(saved, request.overrides))


def _check_alone(request: Request, ckpt: Path) -> None:
    """Refuse settings that would change what a checkpoint without a run folder holds."""
    for typed in request.overrides:
        part = dotted_key(typed).partition(".")[0]
        if part in ("module", "model", *schema.MODEL_PARTS):
            raise UserError(
                f"{typed}: can't change what {ckpt.name} holds\n"
                "  it can be changed with ckpt=RUN_DIR"
            )


def _resumed(request: Request) -> Job:
    """Return the job that continues a run in its folder.

    Only settings that the model does not depend on may change.
    """
    if request.mode.name != "train":
        name = request.mode.name
        instead = f"; ckpt={request.config['resume']}" if request.mode.needs_ckpt else ""
        raise UserError(f"run={name}: not together with resume, which trains{instead}")
    for key in ("run_dir", "ckpt", "images", "init", "sweep", "seed", "seeds", "splits"):
        if typed := request.typed(key):
            raise UserError(
                f"{typed}: not together with resume, which continues in the folder of the run"
            )
    folder = folders.to_resume(str(request.config["resume"]))
    saved = folders.load_config(folder)
    request = request.on(folder / folders.CONFIG, request.config)
    if saved.get("run") != "train":
        raise UserError(
            f"resume: {folder} was a run={saved.get('run')}; there is nothing to resume"
        )
    if (typed := request.typed("task")) and request.config["task"] != saved["task"]:
        raise UserError(f"{typed}: the run in {folder} is of task {saved['task']}")
    changes = [
        o for o in request.overrides if dotted_key(o) not in ("resume", "run", "task", "allow")
    ]
    check_resumable(changes)
    top, allow = request.plain(request.composer.overlay(literal(saved), changes))
    parts = [folders.load_config(folder / name) for name in _parts(top, resumed=True)]
    overlaid = (request.composer.overlay(literal(part), changes) for part in parts)
    runs = [request.plain(config)[0] for config in overlaid]
    return _job(request, folder, [top, *runs], allow, resumed=True, changes=tuple(changes))


def check_resumable(changes: Sequence[str]) -> None:
    """Refuse overrides that may not change when a run is resumed."""
    for change in changes:
        if not f"{dotted_key(change)}.".startswith(schema.RESUMABLE):
            raise UserError(
                f"{change}: can't be changed when a run is resumed\n"
                f"  can be changed: {', '.join(k.rstrip('.') for k in schema.RESUMABLE)}"
            )
