"""What no file may set: Hydra's own node. On the command line, config/hydra_words.py reads it."""

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnkit.lightning.errors import UserError

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
    """Refuse what a file has put into Hydra's own node; what the command line sets is allowed."""
    typed = [o.partition("=")[0].lstrip("+") for o in overrides]
    hydra = OmegaConf.to_container(config["hydra"])
    for key, default in _DEFAULTS.items():
        value: Any = {"hydra": hydra}
        for name in key.split("."):
            value = value[name]
        if value != default and not any(f"{name}.".startswith(f"{key}.") for name in typed):
            raise UserError(f"{key}: given by a file; Hydra's own settings are not for a file")
