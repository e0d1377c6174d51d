"""Every private name of Hydra that attnkit uses, and what no file may set of Hydra's own node.

`hydra.compose` takes no folder to look into first, and tells neither the choices of a group nor the
files it has read.
"""

import re
from collections.abc import Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from attnkit.lightning.errors import UserError

__all__ = [
    "ConfigLoaderImpl",
    "Hydra",
    "absent_group",
    "absent_name",
    "check_hydra",
    "create_config_search_path",
    "note_overrides",
    "told",
]

_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
_BASIC = "hydra._internal.core_plugins.basic_"
# What Hydra makes objects of, imports, puts into the environment or looks for files in, and the
# folders, which a file sets as run_dir.
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
    """Refuse what a file has put into Hydra's own node. On the command line it is allowed."""
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


# --- what Hydra 1.3 and OmegaConf 2.3 say in English alone ----------------------------------------


def absent_group(error: Exception) -> str:
    """The group of an override that matches no line of the defaults lists; empty for other errors.

    The sentence is that of Hydra's issue 620.
    """
    found = re.match(
        r"Could not override '([^'@]+)\S*'\. No match in the defaults list", str(error)
    )
    return found[1] if found else ""


def absent_name(error: Exception) -> str:
    """The NAME of a `${NAME}` that leads to nothing (OmegaConf's issue 1126); empty otherwise."""
    found = re.search(r"Interpolation key '([^']+)' not found", str(error))
    return found[1] if found else ""


def told(error: BaseException) -> tuple[str, list[str]]:
    """The file that an error of Hydra's names, such as `task/mine`, if any; and what it says."""
    text = str(error) if str(error) != "None" else str(error.__cause__)
    found = re.match(r"In '([^']+)': (?:\w+ raised while composing config:\s*)?", text)
    lines = text[found.end() if found else 0 :].splitlines()
    noise = re.compile(r"\s*(full_key:\s*$|object_type=)")
    return found[1] if found else "", [line for line in lines if not (found and noise.match(line))]


# --------------------------------------------------------------------------------------------------


def note_overrides(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Write the task's overrides where Hydra keeps them: ${hydra:overrides.task} and the like."""
    own = [override for override in overrides if not override.is_hydra_override()]
    job = config.hydra.job
    with open_dict(config.hydra):
        config.hydra.overrides.task = [override.input_line for override in own]
        job.override_dirname = get_overrides_dirname(own, **job.config.override_dirname)
