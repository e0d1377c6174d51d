"""Private names of Hydra that attnkit uses, and a check of what files set in Hydra's own node.

The public `hydra.compose` takes no additional folder to search first, and returns neither the
choices of a group nor the files that it has read.
"""

import os
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from attnkit.lightning.errors import UserError

__all__ = [
    "Hydra",
    "Loader",
    "absent_group",
    "absent_name",
    "check_hydra",
    "create_config_search_path",
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


# --- composing -----------------------------------------------------------------------------------

_COMPOSED: dict[str, bytes] = {}
_MOST = 256  # most compositions that are kept; each has 30 kB


class Loader(ConfigLoaderImpl):
    """Hydra's loader with a cache of compositions, since one process may run many commands.

    Args:
        shipped: attnkit's conf/, if it is the only folder, so that a composition depends on nothing
            else; None if there is a user's folder, whose files may refer to the environment.
    """

    def __init__(self, search_path: ConfigSearchPath, shipped: Path | None) -> None:
        super().__init__(search_path)
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
        key = str((options, states))
        if key not in _COMPOSED:
            if len(_COMPOSED) == _MOST:
                _COMPOSED.clear()
            _COMPOSED[key] = pickle.dumps(super().load_configuration(*options))
        config: DictConfig = pickle.loads(_COMPOSED[key])  # the caller's own
        config.hydra.runtime.cwd = os.getcwd()
        return config
