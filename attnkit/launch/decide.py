"""What a command line asks for, decided and checked before anything is imported or written."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnkit.launch import folder as folders
from attnkit.launch import provenance
from attnkit.launch.command import command_line, dotted_key, literal, permission
from attnkit.launch.config import schema
from attnkit.launch.config.compose import Composer, task_config
from attnkit.launch.config.permission import Consent, allowed_by
from attnkit.launch.config.signatures import takes_images
from attnkit.launch.config.sources import Origins, Source
from attnkit.launch.config.validate import validate
from attnkit.launch.modes import MODES, Mode, mode_of
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import absolute

# Keys that say what to do with a saved run; they are never taken over from it.
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
    """A command line: the composition it gives, and where its keys were written."""

    composer: Composer
    overrides: Sequence[str]
    config: DictConfig
    origins: Origins
    consent: Consent
    words: Sequence[str] = ()
    """Hydra's, for a sweep."""
    base: Path | None = None
    """The config.yaml of an earlier run, which takes the place of the shipped configuration."""

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
        """The override that sets exactly this key, if there is one."""
        return next((o for o in self.overrides if o.lstrip("+").startswith(f"{key}=")), "")

    @property
    def mode(self) -> Mode:
        return mode_of(self.config.get("run"))

    @property
    def permission(self) -> tuple[str, ...]:
        """The words of the command line that permit code, for commands that are to follow."""
        allow = [o for o in self.overrides if o.lstrip("+").startswith("allow=")]
        return permission(self.composer.config_dir, allow)

    def folder(self, task: str = "", *, sweep: bool = False) -> Path:
        """The folder to write to, of another task or of that given; not made yet."""
        if not task and not OmegaConf.is_missing(self.config, "task"):
            task = Path(str(self.config["task"])).name
        task = self.composer.job_name or task or "task"
        return folders.plan(self.config.get("run_dir"), task, sweep=sweep)

    def on(self, saved: Path) -> "Request":
        """The same on top of the configuration of a saved run."""
        return self.on_file(saved / folders.CONFIG)

    def on_file(self, path: Path) -> "Request":
        """The same on top of this configuration."""
        source = Source(path, "")
        return replace(self, origins=Origins(self.overrides, lambda: [source]))

    def plain(self, config: DictConfig, **values: Any) -> dict[str, Any]:
        """The configuration with these values, resolved and checked."""
        config = config.copy()
        for key, value in values.items():
            OmegaConf.update(config, key, literal(value), force_add=True)
        plain = self.composer.plain(config, self.origins)
        self.consent.check(plain, self.origins)  # first: nothing that is refused is even read
        validate(plain, self.origins)
        return plain


@dataclass
class Job:
    """One command: the run folder, its configuration, and one resolved configuration per seed."""

    folder: Path
    config: dict[str, Any]
    runs: list[dict[str, Any]]
    fresh: bool = False
    """The folder's name is ours to choose: if it is taken, another one will do."""
    trial: bool = False
    """Of a sweep: the folder may hold the log and the errors of attempts that came to nothing."""
    callbacks: frozenset[str] = frozenset()
    """Names of callbacks that were asked for on the command line."""
    command: str = ""
    """As it was typed."""
    permission: tuple[str, ...] = ()
    """The words of the command line that permit code: --config-dir and allow=."""
    allow: tuple[str, ...] = ()
    """The user's own packages."""
    paths: tuple[str, ...] = ()
    """Folders of the user's own modules."""
    alone: bool = False
    """The checkpoint has no run folder around it: everything comes from inside it."""
    resumed: bool = False
    changes: tuple[str, ...] = ()
    """Overrides given beside resume=."""
    begun: bool = False
    """All objects of the first run could be built, and its folder is written."""

    @property
    def mode(self) -> Mode:
        return mode_of(self.config["run"])


def decide(request: Request, run_dir: Path | None = None) -> Job:
    """The job a command line asks for; `run_dir` is where a trial of a sweep belongs."""
    if run_dir is not None:
        request.config["run_dir"] = literal(str(run_dir))
    config, mode = request.config, request.mode
    if run_dir is not None and not mode.in_sweeps:
        raise UserError(f"run={mode.name}: not with -m; one configuration at a time")
    if config.get("resume") is not None:
        return _resumed(request)
    check_uses(request)
    if "ckpt" in mode.needs or (config.get("ckpt") is not None and "ckpt" in mode.uses):
        return _evaluation(request)
    if "explain" in mode.needs:
        _check_untrained(request)
    if request.base is not None:
        request = _on_base(request, request.base)
        config = request.config
    if config.get("init") is not None:
        config["init"] = literal(folders.initial(str(config["init"])))
    fresh = run_dir is None and config.get("run_dir") is None
    folder = run_dir or request.folder()
    top = request.plain(config, run_dir=str(folder))
    runs = [
        request.plain(config, run_dir=str(folder / name), **values)
        for name, values in _parts(top).items()
    ]
    return _job(request, folder, top, runs or [top], fresh=fresh, trial=run_dir is not None)


def check_uses(request: Request) -> None:
    """Refuse what this mode does not use, or misses.

    Raises:
        UserError: naming the override as it was typed.
    """
    mode, config = request.mode, request.config
    if "ckpt" in mode.needs and config.get("ckpt") is None:
        raise UserError(f"run={mode.name}: needs ckpt=PATH, a checkpoint or a run folder")
    for typed in request.overrides:
        top, _, inner = dotted_key(typed).partition(".")
        if top in _KEYS and not mode.reads(top):
            users = ", ".join(name for name, other in MODES.items() if top in other.uses)
            only = f"; only in run={users}{_INSTEAD.get(top, '')}"
            raise UserError(f"{typed}: has no effect in run={mode.name}{only}")
        if top == "trainer" and inner in mode.leaves:
            raise UserError(f"{typed}: has no effect in run={mode.name}, which does not train")
    if (config.get("record") or {}).get("script") and mode.name != "reproduce":
        name = request.typed("experiment").partition("=")[2]
        raise UserError(
            f"experiment={name}: a script, which run=reproduce runs\n"
            f"  {command_line('run=reproduce', f'reproduce.name={name}')}"
        )
    if config.get("splits") is not None and config.get("seeds") != 1:
        raise UserError("splits: not together with seeds; with -m seed=0,1 there is one job a seed")
    images = config.get("images")
    if images is not None and not absolute(str(images)).exists():
        raise UserError(f"images: no file or folder {absolute(str(images))}")


# At the top of every configuration; of others validate() says that there are none.
_KEYS = {field.name for field in fields(schema.Config)}
_INSTEAD = {
    "ckpt": "\n  to train on: resume=RUN_DIR",
    "sweep": "\n  to go on with a sweep: -m resume=SWEEP_DIR",
}


def _parts(top: dict[str, Any], *, resumed: bool = False) -> dict[str, dict[str, Any]]:
    """The folders of a job of several runs, one for each seed or split, and what differs there.

    The number of splits is put in the place of `all`, so that a job that is resumed knows it.
    """
    splits = top.get("splits")
    if splits is not None:
        data = top.get("data") or {}
        if "split" not in data:
            raise UserError("splits: the data has no split to choose (data.split)")
        found = data.get("num_splits")
        if found is None and not resumed:
            found = _num_splits(data)
        splits = found if splits == "all" else splits
        if splits is None:
            raise UserError(
                "splits=all: the data does not say how many it has (num_splits)\n"
                "  splits=N runs data.split=0 to N - 1"
            )
        if found is not None and splits > found:
            raise UserError(f"splits={splits}: the data has {found}")
        top["splits"] = splits
        return {f"split_{i}": {"data.split": i, "splits": None} for i in range(splits)}
    if top["seeds"] > 1:
        seeds = range(top["seed"], top["seed"] + top["seeds"])
        return {f"seed_{seed}": {"seed": seed, "seeds": 1} for seed in seeds}
    return {}


def _num_splits(node: Mapping[str, Any]) -> int | None:
    """How many fixed splits data have, which are read for it; None: they do not say."""
    from attnkit.launch import console  # which imports torch
    from attnkit.lightning.build.build import build

    console.quiet()
    data = build(node, at="data")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run of each split gives them
        data.prepare_data()
        return getattr(data, "num_splits", None)


def _job(
    request: Request,
    folder: Path,
    top: dict[str, Any],
    runs: list[dict[str, Any]],
    **kwargs: Any,
) -> Job:
    consent = request.consent
    packages = consent.check(top)
    for config in (top, *runs):
        config["allow"] = None  # permission is not for a file to give
    paths = (str(consent.folder),) if consent.folder else ()
    kwargs |= {"callbacks": _callbacks(request, top), "permission": request.permission}
    given = ("--config", str(request.base)) if request.base else ()
    allowed = permission(request.composer.config_dir, ())
    kwargs["command"] = command_line(*given, *request.overrides, permission=allowed)
    return Job(folder, top, runs, allow=packages, paths=paths, **kwargs)


def _callbacks(request: Request, config: Mapping[str, Any]) -> frozenset[str]:
    """Those whose settings were typed, or that a typed choice of the group adds."""
    keys = [dotted_key(override).split(".") for override in request.overrides]
    names = {key[1] for key in keys if key[0] == "callbacks" and len(key) > 1}
    if ["callbacks"] in keys:
        usual = request.composer.compose([f"task={config['task']}"])
        names |= set(config.get("callbacks") or {}) - set(usual["callbacks"])
    return frozenset(names)


def _check_parts_of(request: Request) -> None:
    """What the task must say of this mode: what reads images, explains or exports.

    Without `predict`, the data itself is predicted.
    """
    config, mode = request.config, request.mode
    if "export" in mode.needs and not config.get("export"):
        raise UserError("run=export: needs export, which is null; keep its default value")
    if "explain" in mode.needs and not config.get("explain"):
        raise UserError("run=explain: needs explain, which is null; keep its default value")
    if "images" not in mode.uses:
        return
    images = config.get("images")
    if not takes_images(config.get("predict")):
        if images is not None:
            own = "predicts its own data" if "explain" not in mode.needs else "has no images"
            raise UserError(f"images={images}: this task {own}; leave it out")
        if "explain" in mode.needs:
            _refuse_idle(request, "predict", "run=predict reads it")
        return
    if images is None and "explain" not in mode.needs:
        raise UserError(f"run={config['run']}: needs images=PATH, a folder or a file")
    idle, instead = "data", "which reads images=…\n  of those: predict.batch_size, …"
    if images is None:  # of its own test data
        idle, instead = "predict", "without images=PATH; of the test data: data.batch_size, …"
    _refuse_idle(request, idle, instead)


def _refuse_idle(request: Request, idle: str, instead: str) -> None:
    """Refuse what is typed below a key that this run does not read."""
    for typed in request.overrides:
        if dotted_key(typed).partition(".")[0] == idle:
            raise UserError(f"{typed}: has no effect in run={request.mode.name}, {instead}")


def _check_untrained(request: Request) -> None:
    """UserError unless it is a network of timm with images=PATH, which needs no run."""
    target = (request.config.get("model") or {}).get("_target_")
    if target != "attnkit.models.timm_backbone":
        raise UserError(
            "run=explain: needs ckpt=PATH, a checkpoint or a run folder\n"
            "  for a network not trained with attnkit: model=timm model.name=NAME images=PATH"
        )
    if request.config.get("images") is None:
        raise UserError("run=explain: without ckpt=PATH it needs images=PATH, a folder or a file")
    _check_parts_of(request)


def _on_base(request: Request, base: Path) -> Request:
    """A new run with the configuration of an earlier one, overrides on top.

    What the data gave then, it gives again: it may be other data.
    """
    saved = folders.read_config(base)
    old = Path(str(saved.get("run_dir") or base.parent))
    saved = folders.relocate(literal(saved), Path(literal(str(old))), Path("${run_dir}"))
    kept = ("init", "seeds", "splits")
    saved |= {key: value for key, value in CONTROLS.items() if key not in kept}
    saved["run_dir"] = literal(request.config["run_dir"])
    for key in provenance.load(base.parent).get("from_data", []):
        part, _, name = str(key).partition(".")
        if name in (saved.get(part) or {}):
            saved[part][name] = None
    (saved.get("callbacks") or {}).pop("pruning", None)  # of a study, which this run is not in
    config = request.composer.overlay(saved, request.overrides)
    return replace(request.on_file(base), config=config)


def _evaluation(request: Request) -> Job:
    """test or predict: the configuration of the run the checkpoint lies in, overrides on top."""
    given = request.config
    ckpt = folders.checkpoint(str(given["ckpt"]))
    home = folders.run_of(ckpt)
    if home is None:
        _check_alone(request, ckpt)
        folder = request.folder()
        config = given.copy()
    else:
        saved = folders.load_config(home)
        folder = request.folder(str(saved["task"]))
        saved = {**literal(folders.relocate(saved, home, folder)), **CONTROLS}
        # A quick look at training is no reason to test or predict on a part of the images.
        saved["trainer"] = {**(saved.get("trainer") or {}), "limit_batches": None}
        explain = given.get("explain")  # what to do with a saved run is not taken over from it
        saved["explain"] = explain and OmegaConf.to_container(explain, resolve=False)
        config = request.composer.overlay(saved, request.overrides)
        request = request.on(home)
    request = replace(request, config=config)
    _check_parts_of(request)
    top = request.plain(config, run_dir=str(folder), ckpt=str(ckpt))
    if "export" in request.mode.needs and isinstance(top["export"].get("folder"), str):
        folders.check_writable(absolute(top["export"]["folder"]), "export.folder")
    fresh = given.get("run_dir") is None
    return _job(request, folder, top, [top], fresh=fresh, alone=home is None)


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
    """The same run in the same folder; only what the model does not depend on may change."""
    if request.mode.name != "train":
        name = request.mode.name
        instead = f"; ckpt={request.config['resume']}" if "ckpt" in request.mode.needs else ""
        raise UserError(f"run={name}: not together with resume, which trains{instead}")
    for key in ("run_dir", "ckpt", "images", "init", "sweep", "seed", "seeds", "splits"):
        if typed := request.typed(key):
            raise UserError(
                f"{typed}: not together with resume, which continues in the folder of the run"
            )
    folder = folders.to_resume(str(request.config["resume"]))
    saved = folders.load_config(folder)
    request = request.on(folder)
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
    top = _overlaid(request, saved, changes)
    parts = [folders.load_config(folder / name) for name in _parts(top, resumed=True)]
    runs = [_overlaid(request, part, changes) for part in parts] or [top]
    return _job(request, folder, top, runs, resumed=True, changes=tuple(changes))


def check_resumable(changes: Sequence[str]) -> None:
    """Refuse what may not change in a run that goes on."""
    for change in changes:
        if not f"{dotted_key(change)}.".startswith(schema.RESUMABLE):
            raise UserError(
                f"{change}: can't be changed when a run is resumed\n"
                f"  can be changed: {', '.join(k.rstrip('.') for k in schema.RESUMABLE)}"
            )


def _overlaid(request: Request, saved: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    return request.plain(request.composer.overlay(literal(saved), changes))
