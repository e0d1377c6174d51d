"""Every private name of Hydra that attnkit uses, and why nothing public does.

`hydra.compose` takes no folder to look into first, and tells neither the choices of a group nor the
files it has read.
"""

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path

__all__ = [
    "ConfigLoaderImpl",
    "Hydra",
    "create_config_search_path",
]
