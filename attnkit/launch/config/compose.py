"""Composes a command line into one plain, resolved and checked configuration, without torch.

What Hydra accepts silently (unknown keys in a file, `${typo}`, relative paths) is checked, and
Hydra's errors become `UserError`s of at most three lines.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from attnkit.core.names import nearest
from attnkit.launch.command import QUESTION_MARKS, quoted
from attnkit.launch.config._hydra import (
    Hydra,
    Loader,
    absent_group,
    absent_name,
    check_hydra,
    create_config_search_path,
    note_overrides,
    split_message,
)
from attnkit.launch.config.files import CONFIG_NAME, Origins, Source, folders, groups, short
from attnkit.launch.config.schema import LEVELS
from attnkit.lightning.errors import UserError

CONF = "pkg://attnkit.conf"
_FIXED = ("task", "level")  # groups whose choice a saved run keeps

# ${only_for:value,choice,a,b} is the value where the choice is a or b, else null.
OmegaConf.register_new_resolver(
    "only_for", lambda value, choice, *owners: value if choice in owners else None, replace=True
)
OmegaConf.register_new_resolver(QUESTION_MARKS, lambda: "???", replace=True)


def readable(override: str) -> str:
    """Return a typed override, its value quoted where Hydra could not read it.

    Quoted are values with letters that are not ASCII, paths with "=" in them (such as the folders
    of a sweep's trials) and any existing path.
    """
    key, _, value = override.partition("=")
    if re.fullmatch(r"[\w./@:+-]*", value, re.ASCII) or value[0] in "'\"":
        return override
    is_path = key in ("ckpt", "images", "init", "resume", "run_dir", "sweep")
    plain = re.fullmatch(r"[\w./~@:+ =\x80-\U0010ffff-]+", value)
    if is_path and (plain or os.path.exists(os.path.expanduser(value))):
        return f"{key}={quoted(value)}"
    if plain and "=" not in value and not value.isascii():
        return f"{key}={quoted(value)}"
    return override


class Composer:
    """Hydra's config loader over attnkit's conf/ and the user's folder."""

    def __init__(self, config_dir: Path | None = None) -> None:
        version.setbase("1.3")
        self.folders = folders(config_dir)
        """The folders that configurations are read from."""
        search_path = create_config_search_path(CONF)
        if config_dir is not None:
            search_path.prepend(
                "command-line", f"file://{config_dir}", anchor=SearchPathQuery(provider="schema")
            )
        self.config_dir = config_dir
        self.job_name: str | None = None
        """The value of hydra.job.name, which replaces the task's name in outputs/<task>/…"""
        self.loader = Loader(search_path, None if config_dir else self.folders[0])
        self.hydra = Hydra("attnkit", self.loader)

    # --- groups and overrides ---

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Each group and its choices."""
        return groups(self.folders)

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        """Return the overrides as Hydra parses them."""
        parser = OverridesParser.create(config_loader=self.loader)
        return [self._parsed(parser, text) for text in overrides]

    def _parsed(self, parser: OverridesParser, text: str) -> Override:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise UserError(_unreadable(text, error)) from error
        override.config_loader = self.loader  # gives glob(…) the choices of a group
        if override.is_sweep_override() or override.is_delete():
            return override
        choices = self.groups.get(override.key_or_group)
        if choices and not isinstance(override.value(), str | list | dict):
            raise UserError(f"expected a choice or a mapping\n  {', '.join(choices)}", key=text)
        return override

    # --- composing ---

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return Hydra's composition, including its own node; keys that no file has are added."""
        config = self._composed(overrides)
        check_hydra(config, overrides)
        written: Any = OmegaConf.to_container(config)
        if not isinstance(written.get("task"), str):
            path = f"task/{OmegaConf.select(config, 'hydra.runtime.choices.task')}.yaml"
            first = "a task's file begins with the line '# @package _global_' and names its task"
            raise UserError(f"{self._broken_file() or path}: {first}")
        task, level = written["task"], written.get("level")
        levels = LEVELS.get(task, ())
        if levels and level not in levels and level in sum(LEVELS.values(), ()):
            raise UserError(f"level={level}: task={task} has {' and '.join(levels)}")
        if OmegaConf.select(config, "experiment") is not None:
            path = f"experiment/{OmegaConf.select(config, 'hydra.runtime.choices.experiment')}.yaml"
            raise UserError(
                f"{path}: its keys are below `experiment`, where nothing reads them\n"
                "  an experiment's file begins with the line '# @package _global_'"
            )
        return config

    def _composed(self, overrides: Sequence[str]) -> DictConfig:
        """Compose the chosen files with Hydra, and then set the keys.

        Hydra itself refuses a key that no file lists. Here any argument of a constructor may be
        given; validate() reports other keys, in the same form as all other problems.
        """
        parsed = self.parse(overrides)
        files = [o for o in parsed if self._is_for_hydra(o)]
        texts = [str(o.input_line) for o in files]
        with self._translated(overrides):
            config = self._of_files(texts)
            self._set(config, [o for o in parsed if o not in files])
            note_overrides(config, parsed)
        return config

    def _is_for_hydra(self, override: Override) -> bool:
        """Return whether an override chooses a file or sets Hydra's own node."""
        is_group = self.loader.repository.group_exists(override.key_or_group)
        chooses = is_group and (override.is_delete() or isinstance(override.value(), str | list))
        return chooses or override.package is not None or override.is_hydra_override()

    def _of_files(self, texts: list[str]) -> DictConfig:
        try:
            return self.hydra.compose_config(
                CONFIG_NAME, texts, run_mode=RunMode.RUN, with_log_configuration=False
            )
        except ConfigCompositionException as error:
            group = absent_group(error)
            if group not in map(_key, texts):
                raise
            if group == "level":
                typed = next(text for text in texts if _key(text) == group)
                raise UserError(
                    f"{typed}: the task has no levels; leave it out, or choose a task with levels, "
                    f"such as task=graph with {', '.join(LEVELS['graph'])}"
                ) from error
            # the task has no choice in this group yet
            return self._of_files([f"+{t}" if _key(t) == group else t for t in texts])

    def _set(
        self, config: DictConfig, overrides: Sequence[Override], *, may_miss: bool = False
    ) -> None:
        """Set keys, with or without `+`, whether or not they exist; delete keys with `~`.

        Args:
            may_miss: whether a key to be deleted may be missing.
        """
        deleted: set[str] = set()
        for override in overrides:
            key, value = override.key_or_group, override.value()
            if override.is_delete():
                is_gone = may_miss and OmegaConf.select(config, key, default=_GONE) is _GONE
                if key not in deleted and not is_gone:  # a retried trial has the override twice
                    _delete(config, key, value)
                deleted.add(key)
                continue
            try:
                OmegaConf.update(config, key, value, merge=True, force_add=True)
            except OmegaConfBaseException as error:
                raise UserError(f"{override.input_line}: {_one_line(error)}") from error

    def files(self, overrides: Sequence[str]) -> list[Source]:
        """Return the files of a composition in the order of merging; only messages use them."""
        try:
            result = self.loader.compute_defaults_list(CONFIG_NAME, list(overrides), RunMode.RUN)
        except Exception:
            return []
        files = []
        for default in result.defaults:
            paths = [folder / f"{default.config_path}.yaml" for folder in self.folders]
            if path := next(filter(Path.is_file, paths), None):
                files.append(Source(path, default.package or ""))
        return files

    def overlay(self, base: Mapping[str, Any], overrides: Sequence[str]) -> DictConfig:
        """Return a saved configuration with the overrides applied; groups are replaced whole."""
        config = OmegaConf.create(dict(base))
        parsed = self.parse(overrides)
        for override in parsed:
            key = override.key_or_group
            if key in _FIXED and override.value() != (of := self._saved(base, key)):
                raise UserError(f"{key}={override.value()}: the saved run is of {key} {of}")
            if key == "experiment":
                raise UserError(f"{override.input_line}: a saved run has its experiment already")
        chosen = [
            o for o in parsed if o.key_or_group in self.groups and o.key_or_group not in _FIXED
        ]
        if chosen:
            lines = [str(o.input_line) for o in chosen]
            fixed = [f"{key}={base[key]}" for key in _FIXED if base.get(key) is not None]
            fresh = self.compose([*fixed, *lines])
            config.update({o.key_or_group: fresh[o.key_or_group] for o in chosen})
        rest = [o for o in parsed if o not in chosen and o.key_or_group not in _FIXED]
        with self._translated(overrides):
            self._set(config, rest, may_miss=True)  # an earlier resume may have deleted the key
        return config

    def _saved(self, base: Mapping[str, Any], key: str) -> Any:
        """Return a saved value of a key, or its default if the saved run is older than the key."""
        if base.get(key) is None and base.get("task") is not None:
            return self.compose([f"task={base['task']}"]).get(key)
        return base.get(key)

    def plain(self, config: DictConfig, origins: Origins) -> dict[str, Any]:
        """Return the configuration resolved, as plain dicts and lists; no value may be missing."""
        try:
            values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        except MissingMandatoryValue as error:
            key = str(getattr(error, "full_key", "") or "")
            message = f"a value is needed: {key}=…"
            raise UserError(message, key=key, where=origins.written(key)) from error
        except OmegaConfBaseException as error:
            raise _interpolation(error, config, origins) from error
        assert isinstance(values, dict)
        return {str(k): v for k, v in values.items()}

    @contextmanager
    def _translated(self, overrides: Sequence[str]) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except MissingConfigException as error:
            raise UserError(self._no_such_choice(error, overrides)) from error
        except OverrideParseException as error:
            raise UserError(_unreadable(error.override, error)) from error
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = (
                f"{short(Path(mark.name))}:{mark.line + 1}:{mark.column + 1}" if mark else "YAML"
            )
            raise UserError(f"{where}: not valid YAML: {error.problem}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{self._broken_file()}: not text in UTF-8 ({error.reason})") from error
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            where = self._broken_file() or " ".join(overrides)
            what = "not valid YAML: " if isinstance(error, yaml.YAMLError) else ""
            what += _one_line(error)
            if isinstance(error, RecursionError):
                what = "defaults lists that lead back to themselves, or are nested too deeply"
            raise UserError(f"{where}: {what}") from error
        except OSError as error:
            if error.filename is None:  # Hydra's, for a file that is neither mapping nor list
                where = self._broken_file() or "a configuration file"
                raise UserError(f"{where}: expected a mapping") from error
            raise UserError(f"{error.filename!s}: {error.strerror}") from error
        except (HydraException, OmegaConfBaseException) as error:
            file, lines = split_message(error)
            if file:
                paths = [folder / f"{file}.yaml" for folder in reversed(self.folders)]
                where = short(next(filter(Path.is_file, paths), paths[0]))
            elif lines in (["str"], ["None"]) or ":" not in "".join(lines):
                where = self._broken_file() or " ".join(overrides)
                lines = str(error.__cause__ or error).splitlines()[:1]
            else:
                where = ""
            raise UserError(_one_line("\n".join(lines), 3), key=where) from error

    def _broken_file(self) -> str:
        """Return the first of the user's files that is not a valid configuration by itself."""
        for path in sorted(self.config_dir.glob("*/*.yaml")) if self.config_dir else []:
            try:
                content = yaml.safe_load(path.read_text(encoding="utf-8"))
                defaults = content.get("defaults", [])
                if any(not isinstance(line, str | dict) for line in defaults):
                    return short(path)
                OmegaConf.create(content)
            except Exception:
                return short(path)
            names = [line if isinstance(line, str) else "".join(line.values()) for line in defaults]
            if path.stem in names or isinstance(defaults, str | dict):
                return short(path)
        return ""

    def _no_such_choice(self, error: MissingConfigException, overrides: Sequence[str]) -> str:
        missing = error.missing_cfg_file or ""
        group, _, choice = missing.rpartition("/")
        choices = self.groups.get(group)
        if choices is None:
            return _one_line(error, 2)
        typed = next((o for o in overrides if o.lstrip("+") == f"{group}={choice}"), None)
        message = f"{typed or f'{group}={choice}'}: {group} has no choice {choice!r}"
        message += f"{nearest(choice, choices)}\n  choices: {', '.join(choices)}"
        if typed is None and (where := self._mention(group, choice)):
            message += f"\n  in {where}"
        elif group == "task" and self.config_dir is None:
            message += "\n  a task of your own needs --config-dir FOLDER, the one with task/ in it"
        return message

    def _mention(self, group: str, choice: str) -> str:
        """Return file and line of a defaults list that names a choice."""
        pattern = re.compile(rf"(^|[\s/\[{{]){re.escape(group)}\s*:\s*{re.escape(choice)}\b")
        for folder in reversed(self.folders):
            for path in sorted(folder.glob("*/*.yaml")):
                for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                    if pattern.search(line):
                        return f"{short(path)}:{number}"
        return ""


_GONE = object()


def _delete(config: DictConfig, key: str, value: Any = None) -> None:
    """Delete a key.

    Raises:
        UserError: the key does not exist, or has another value than the one given.
    """
    above, _, name = key.rpartition(".")
    node = OmegaConf.select(config, above) if above else config
    if not isinstance(node, DictConfig) or name not in node:
        known = node if isinstance(node, DictConfig) else config
        raise UserError(f"~{key}: there is no such key{nearest(name, map(str, known))}")
    if value is not None and value != node[name]:
        raise UserError(f"~{key}={value}: its value is {node[name]}")
    with open_dict(node):
        del node[name]


def task_config(composed: DictConfig) -> DictConfig:
    """Return a composition without Hydra's own node, open to new keys."""
    HydraConfig.instance().set_config(composed)  # for ${hydra:…} in the user's files
    config = composed.copy()
    OmegaConf.set_readonly(config, False)
    OmegaConf.set_struct(config, False)
    config.pop("hydra", None)
    return config


def _key(override: str) -> str:
    return override.partition("=")[0]


def _unreadable(text: str, error: Exception) -> str:
    if "=" not in text and not text.startswith("~"):
        return f"{text}: expected key=value or group=choice\n  --help lists keys and groups"
    reason = _one_line(error)
    return f"{text}: this value can't be read: {reason}\n  quote it: '{_key(text)}=\"…\"'"


def _interpolation(
    error: OmegaConfBaseException, config: DictConfig, origins: Origins
) -> UserError:
    key = str(getattr(error, "full_key", "") or "")
    name = absent_name(error)
    if isinstance(error, InterpolationKeyError) and name:
        keys = _keys(OmegaConf.to_container(config))
        hint = nearest(f"${{{name}}}", (f"${{{one}}}" for one in keys))
        message = f"${{{name}}} names no key{hint}"
    elif isinstance(error, GrammarParseError | InterpolationResolutionError):
        message, key = _one_line(error), key or "interpolation"
    else:
        message = _one_line(error, 1 if key else 2)
    return UserError(message, key=key, where=origins.of(key) if key else "")


def _keys(written: Any, prefix: str = "") -> Iterator[str]:
    for name, value in written.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")


def _one_line(error: object, lines: int = 1) -> str:
    kept = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "\n  ".join(kept[:lines]) or type(error).__name__
