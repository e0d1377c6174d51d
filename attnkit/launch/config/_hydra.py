"""Every private name of Hydra that attnkit uses, and what no file may set of Hydra's own node.

`hydra.compose` takes no folder to look into first, and tells neither the choices of a group nor the
files it has read.
"""

from collections.abc import Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from omegaconf import DictConfig, OmegaConf

from attnkit.lightning.errors import UserError

__all__ = ["ConfigLoaderImpl", "Hydra", "check_hydra", "create_config_search_path"]

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
