"""Private names of Hydra that attnkit uses, and a check of what files set in Hydra's own node.

The public `hydra.compose` takes no additional folder to search first, and returns neither the
choices of a group nor the files that it has read.
"""

import os
import pickle
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import (
    ImportlibResourcesConfigSource,
)
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf._utils import get_yaml_loader

from attnkit.lightning.errors import UserError

__all__ = [
    "Hydra",
    "Loader",
    "absent_group",
    "absent_name",
    "check_hydra",
    "create_config_search_path",
    "load",
    "note_overrides",
    "split_message",
]

_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
_BASIC = "hydra._internal.core_plugins.basic_"
# Keys by which Hydra builds objects, imports modules, changes the environment and searches for
# files; and output folders, which a file sets with run_dir instead.
_DEFAULTS: dict[str, Any] = {
    "hydra.callbacks": {},
    "hydra.hydra_logging": _LOGGING,
    "hydra.job.chdir": None,
    "hydra.job.env_set": {},
    "hydra.job.name": "attnkit",
    "hydra.job_logging": _LOGGING,
    "hydra.launcher": {"_target_": f"{_BASIC}launcher.BasicLauncher"},
    "hydra.run": {"dir": "."},
    "hydra.searchpath": [],
    "hydra.sweep": {
        "dir": "multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}",
        "subdir": "${hydra.job.num}",
    },
    "hydra.sweeper": {
        "_target_": f"{_BASIC}sweeper.BasicSweeper",
        "max_batch_size": None,
        "params": None,
    },
}


def check_hydra(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse what a file sets in Hydra's own node. The command line may set it."""
    typed = [o.partition("=")[0].lstrip("+") for o in overrides]
    hydra = OmegaConf.to_container(config["hydra"])
    for key, default in _DEFAULTS.items():
        value: Any = {"hydra": hydra}
        for name in key.split("."):
            value = value[name]
        if value != default and not any(f"{name}.".startswith(f"{key}.") for name in typed):
            raise UserError(
                f"{key}: set in a file; Hydra's own settings belong on the command line"
            )


# --- facts that Hydra 1.3 and OmegaConf 2.3 give only in the text of an error ---------------------


def absent_group(error: Exception) -> str:
    """Return the group of an override that matches no defaults list; empty for other errors.

    The text that is matched is that of Hydra's issue 620.
    """
    found = re.match(
        r"Could not override '([^'@]+)\S*'\. No match in the defaults list", str(error)
    )
    return found[1] if found else ""


def absent_name(error: Exception) -> str:
    """Return the NAME of a `${NAME}` that does not exist (OmegaConf's issue 1126), or nothing."""
    found = re.search(r"Interpolation key '([^']+)' not found", str(error))
    return found[1] if found else ""


def split_message(error: BaseException) -> tuple[str, list[str]]:
    """Return the file that an error of Hydra's names (`task/mine`), or nothing, and its lines."""
    text = str(error) if str(error) != "None" else str(error.__cause__)
    found = re.match(r"In '([^']+)': (?:\w+ raised while composing config:\s*)?", text)
    lines = text[found.end() if found else 0 :].splitlines()
    noise = re.compile(r"\s*(full_key:\s*$|object_type=)")
    return found[1] if found else "", [line for line in lines if not (found and noise.match(line))]


# --------------------------------------------------------------------------------------------------


def note_overrides(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Store the task's overrides where ${hydra:overrides.task} and similar keys find them."""
    own = [override for override in overrides if not override.is_hydra_override()]
    job = config.hydra.job
    with open_dict(config.hydra):
        config.hydra.overrides.task = [override.input_line for override in own]
        job.override_dirname = get_overrides_dirname(own, **job.config.override_dirname)


# --- reading files --------------------------------------------------------------------------------

_Loader: Any = get_yaml_loader()
if yaml.__with_libyaml__:

    class _Loader(yaml.cyaml.CParser, get_yaml_loader()):  # type: ignore[no-redef,misc]
        """OmegaConf's loader with libyaml's parser, which is eight times as fast."""

        def __init__(self, stream: TextIO) -> None:
            yaml.cyaml.CParser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)


def load(file: TextIO) -> DictConfig | ListConfig:
    """Return what `OmegaConf.load` reads from a file; OmegaConf reads what libyaml refuses."""
    try:
        content = yaml.load(file, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        content = ""
    if content is None or isinstance(content, dict | list):
        return OmegaConf.create({} if content is None else content)
    file.seek(0)
    return OmegaConf.load(file)


_READ: dict[str, bytes] = {}
_COMPOSED: dict[str, bytes] = {}
_MOST = 256  # most entries of each cache; they have 1 kB and 30 kB


def _once(kept: dict[str, bytes], key: str, make: Callable[[], Any]) -> Any:
    """Return a copy of `make()`, which is called once for each key, since one process may run many
    commands."""
    if key not in kept:
        made = make()
        if len(kept) == _MOST:
            kept.clear()
        kept[key] = pickle.dumps(made)
    return pickle.loads(kept[key])


def _result(source: ConfigSource, path: Any) -> ConfigResult:
    with path.open(encoding="utf-8") as file:
        text = file.read()
        header = source._get_header_dict(text[:512])
        file.seek(0)
        return ConfigResult(
            config=_once(_READ, text, partial(load, file)),
            path=f"{source.scheme()}://{source.path}",
            provider=source.provider,
            header=header,
        )


class _Folder(FileConfigSource):
    def load_config(self, config_path: str) -> ConfigResult:
        return _result(self, Path(self.path, self._normalize_file_name(config_path)))


class _Package(ImportlibResourcesConfigSource):
    def _read_config(self, res: Any) -> ConfigResult:
        return _result(self, res)


_SOURCES: dict[str, type[ConfigSource]] = {"file": _Folder, "pkg": _Package}


class _Repository(ConfigRepository):
    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        super().initialize_sources(config_search_path)
        self.sources = [
            _SOURCES.get(s.scheme(), type(s))(s.provider, f"{s.scheme()}://{s.path}")
            for s in self.sources
        ]


class Loader(ConfigLoaderImpl):
    """Hydra's loader with a cache of compositions, since one process may run many commands.

    Args:
        shipped: attnkit's conf/, if it is the only folder, so that a composition depends on nothing
            else; None if there is a user's folder, whose files may refer to the environment.
    """

    def __init__(self, search_path: ConfigSearchPath, shipped: Path | None) -> None:
        super().__init__(search_path)
        self.repository = _Repository(search_path)
        self.shipped = shipped

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        options = (config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        plain = all(re.fullmatch(r"\w+=[\w-]+", override) for override in overrides)
        if self.shipped is None or not plain:
            return super().load_configuration(*options)
        states = [(p, p.stat().st_mtime_ns) for p in sorted(self.shipped.glob("**/*.yaml"))]
        compose = partial(super().load_configuration, *options)
        config: DictConfig = _once(_COMPOSED, str((options, states)), compose)
        config.hydra.runtime.cwd = os.getcwd()
        return config
