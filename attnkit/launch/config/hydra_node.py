"""What no file may set: Hydra builds, imports and exports what its own node names, unasked."""

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnkit.launch.config.permission import targets
from attnkit.lightning.errors import UserError

_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
_BASIC = "hydra._internal.core_plugins.basic_"
_PLUGINS = (_BASIC, "hydra_plugins.", "optuna.samplers.")
# What Hydra makes objects of, imports or puts into the environment when it runs a sweep.
_HYDRA_DEFAULTS: dict[str, Any] = {
    "hydra.callbacks": {},
    "hydra.hydra_logging": _LOGGING,
    "hydra.job.chdir": None,
    "hydra.job.env_set": {},
    "hydra.job_logging": _LOGGING,
    "hydra.launcher": {"_target_": f"{_BASIC}launcher.BasicLauncher"},
    "hydra.searchpath": [],
    "hydra.sweeper": {
        "_target_": f"{_BASIC}sweeper.BasicSweeper",
        "max_batch_size": None,
        "params": None,
    },
}


def check_hydra(config: DictConfig, overrides: Sequence[str]) -> None:
    """Hydra builds what its node names without asking anyone, so no file may name anything there.

    A launcher or a sweeper may be chosen, on the command line.
    """
    typed = {o.partition("=")[0].lstrip("+").replace("/", ".") for o in overrides}
    hydra = OmegaConf.to_container(config["hydra"])
    assert isinstance(hydra, dict)
    for key, harmless in _HYDRA_DEFAULTS.items():
        value: Any = {"hydra": hydra}
        for name in key.split("."):
            value = value[name]
        if any(name == key or name.startswith(f"{key}.") for name in typed):
            named = [target for _, target in targets(value)]
            if all(target.startswith(_PLUGINS) for target in named):
                continue
        if value != harmless:
            raise UserError(f"{key}: given by a file; Hydra's own settings are not for a file")
