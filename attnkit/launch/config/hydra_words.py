"""Hydra's own settings on the command line ("words"), and what each of them means here.

| word | meaning |
|---|---|
| `hydra.run.dir` | `run_dir` of one run |
| `hydra.sweep.dir` | `run_dir` of a sweep |
| `hydra.sweep.subdir` | the name of each trial's folder |
| `hydra.job.name` | replaces the task's name in outputs/<task>/… |
| `hydra.job.config.override_dirname.*` | how `${hydra.job.override_dirname}` is written |
| `hydra/launcher`, `hydra.launcher.*` | where the trials of a sweep run |
| `hydra/sweeper`, `hydra.sweeper.*` | what chooses the trials |

Hydra itself resolves interpolations in them. Its other settings are refused.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attnkit.launch.command import key_of, quoted
from attnkit.launch.config.compose import Composer
from attnkit.launch.config.files import Origins
from attnkit.launch.config.signatures import known
from attnkit.launch.config.validate import check_arguments
from attnkit.lightning.errors import UserError, first_line

RUN_DIR, SWEEP_DIR, SUBDIR = "hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"
JOB_NAME, DIRNAME = "hydra.job.name", "hydra.job.config.override_dirname."
_PLACES = (RUN_DIR, SWEEP_DIR, SUBDIR, JOB_NAME)
_LAUNCHER = ("hydra/launcher", "hydra.launcher.")
_SWEEPER = ("hydra/sweeper", "hydra.sweeper.")
_LONGEST = 255  # bytes in a folder's name


def is_launcher(word: str) -> bool:
    """Return whether a word of Hydra's sets the launcher, which decides where trials run."""
    return key_of(word).startswith(_LAUNCHER)


def is_sweeper(word: str) -> bool:
    """Return whether a word of Hydra's sets the sweeper, which chooses the trials."""
    return key_of(word).startswith(_SWEEPER)


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of the configuration, and Hydra's words."""
    hydra = [o for o in overrides if re.match(r"hydra[./]", key_of(o))]
    return [o for o in overrides if o not in hydra], hydra


def read(
    composer: Composer, overrides: Sequence[str], *, multirun: bool
) -> tuple[list[str], list[str]]:
    """Return the overrides without Hydra's words, and those of its words that a sweep needs.

    Hydra's folders become `run_dir`, and its job name becomes that of the composer.

    Raises:
        UserError: a word is not supported, or contradicts another one.
    """
    rest, words = split(overrides)
    for word in words:
        _check_known(word)
    _check_place(rest, words, multirun=multirun)
    given = {key_of(word): word for word in words}
    for_sweep = [w for w in words if key_of(w) not in (RUN_DIR, SWEEP_DIR, JOB_NAME)]
    if JOB_NAME in given:
        composer.job_name = _resolved(composer, rest, words, JOB_NAME)
        if Path(composer.job_name).name != composer.job_name or composer.job_name[:1] in ("", "."):
            raise UserError(f"{given[JOB_NAME]}: expected a name for a folder")
    for key in (RUN_DIR, SWEEP_DIR):
        if key in given:
            rest.append(f"run_dir={quoted(_resolved(composer, rest, words, key))}")
    return rest, for_sweep


def trial_folder(
    composer: Composer, words: Sequence[str], overrides: Sequence[str], number: int
) -> str | None:
    """Return the name that hydra.sweep.subdir gives a trial's folder; None if it is not set.

    Raises:
        UserError: it is not the name of one folder.
    """
    word = next((w for w in reversed(words) if key_of(w) == SUBDIR), None)
    if word is None:
        return None
    own = [w for w in words if key_of(w) == SUBDIR or key_of(w).startswith(DIRNAME)]
    name = _resolved(composer, overrides, [*own, f"hydra.job.num={number}"], SUBDIR)
    if Path(name).name != name or name[:1] in ("", ".") or len(name.encode()) > _LONGEST:
        raise UserError(
            f"{word}: expected the name of one folder, got {name[:200]!r}\n"
            "  hydra.job.config.override_dirname.exclude_keys=[KEY] leaves a long one out"
        )
    return name


def settings(
    composer: Composer, words: Sequence[str], node: str, kind: type, what: str
) -> dict[str, Any]:
    """Return the values of `hydra.launcher.*` or `hydra.sweeper.*`, checked against a dataclass.

    Raises:
        UserError: the dataclass has no such field, or one of another type.
    """
    config = OmegaConf.create({})
    for override in composer.parse([w for w in words if key_of(w).startswith(f"{node}.")]):
        value = _one_value(override)
        if isinstance(value, str) and "${" in value:
            raise UserError(f"{override.input_line}: expected a value, not an interpolation")
        OmegaConf.update(config, override.key_or_group.removeprefix(f"{node}."), value)
    given: Any = OmegaConf.to_container(config)
    check_arguments(node, given, known(f"{kind.__module__}.{kind.__name__}"), Origins(), what=what)
    return given


def _one_value(override: Override) -> Any:
    if override.is_sweep_override() or override.is_delete():
        raise UserError(f"{override.input_line}: expected one value")
    return override.value()


def _check_known(word: str) -> None:
    key = key_of(word)
    known = key in (*_PLACES, _LAUNCHER[0], _SWEEPER[0])
    if not known and not key.startswith((DIRNAME, _LAUNCHER[1], _SWEEPER[1])):
        raise UserError(
            f"{key}: not used by attnkit, which makes the run folder and its logs itself\n"
            f"  Hydra's settings that attnkit uses: {', '.join(_PLACES)},\n"
            "  hydra/launcher, hydra/sweeper and their settings"
        )


def _check_place(rest: Sequence[str], words: Sequence[str], *, multirun: bool) -> None:
    """Refuse a sweep's words without -m, a run's words with it, and contradictions."""
    keys = {key_of(word): word for word in words}
    typed = {key_of(override): override for override in rest}
    mine = SWEEP_DIR if multirun else RUN_DIR
    if multirun and RUN_DIR in keys:
        raise UserError(f"{keys[RUN_DIR]}: is for a single run; for a sweep use {SWEEP_DIR}")
    retried = typed.get("run") == "run=retry"
    for key, word in keys.items():
        of_sweep = key in (SWEEP_DIR, SUBDIR) or key.startswith(DIRNAME)
        if not multirun and of_sweep:
            raise UserError(f"{word}: only with -m; the folder of one run is {RUN_DIR}")
        if not multirun and (is_sweeper(word) or (is_launcher(word) and not retried)):
            raise UserError(f"{word}: only with -m, for several runs; this is one")
    for key in _PLACES:
        for other in ("resume", "sweep"):
            if key in keys and other in typed:
                raise UserError(
                    f"{keys[key]}: not together with {typed[other]}, which has a folder"
                )
    if mine in keys and "run_dir" in typed:
        raise UserError(f"{keys[mine]} and {typed['run_dir']}: both name the folder; give one")
    named = any(re.search(r"hydra[.:]job\.name", o.partition("=")[2]) for o in (*words, *rest))
    submitted = any("submitit" in word for word in words)
    if JOB_NAME in keys and (mine in keys or "run_dir" in typed) and not (named or submitted):
        other = keys.get(mine) or typed["run_dir"]
        raise UserError(f"{keys[JOB_NAME]}: has no effect, because {other} names the folder")


def _resolved(composer: Composer, overrides: Sequence[str], words: Sequence[str], key: str) -> str:
    parsed = composer.parse(overrides)
    plain = [t for t, o in zip(overrides, parsed, strict=True) if not o.is_sweep_override()]
    own = [w for w in words if not is_launcher(w) and not is_sweeper(w)]
    for override in composer.parse(own):
        _one_value(override)
    config = composer.compose([*plain, *own])
    dirname = config.hydra.job.config.override_dirname
    typed = [str(o.input_line) for o in parsed if o.key_or_group not in dirname.exclude_keys]
    joined = dirname.item_sep.join(sorted(typed)).replace("=", dirname.kv_sep)
    config.hydra.job.override_dirname = joined  # as Hydra computes it from the typed overrides
    HydraConfig.instance().set_config(config)  # for ${hydra:…}
    try:
        value = str(OmegaConf.select(config, key, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise UserError(f"{key}: {first_line(error)}") from error
    if not value.strip():
        raise UserError(f"{key}=: expected a folder")
    return value
