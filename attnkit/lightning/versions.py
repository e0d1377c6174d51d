"""The versions of the packages a result comes from."""

import sys
from collections.abc import Iterable
from importlib import metadata

PACKAGES = (
    "torch", "lightning", "torchvision", "torchmetrics", "torch-geometric", "timm", "numpy",
    "hydra-core", "safetensors",
)  # fmt: skip


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """attnkit's version, also where it runs from a checkout and is not installed, and those of
    the packages that are installed."""
    found = {"attnkit": sys.modules["attnkit"].__version__}  # which imports what is above this
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
