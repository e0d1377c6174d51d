"""Every private name of Hydra that attnkit uses, and why nothing public does.

`hydra.compose` takes no folder to look into first, and tells neither the choices of a group nor the
files it has read. How `a=1,2 b=3,4` is multiplied out is its sweeper's alone.
"""

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path

__all__ = [
    "BasicSweeper",
    "Callbacks",
    "ConfigLoaderImpl",
    "Hydra",
    "create_config_search_path",
]
