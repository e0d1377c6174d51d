"""The versions of the packages that a result depends on."""

import sys
from collections.abc import Iterable
from importlib import metadata

PACKAGES = (
    "torch", "lightning", "torchvision", "torchmetrics", "torch-geometric", "timm", "numpy",
    "hydra-core", "safetensors",
)  # fmt: skip


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return attnkit's version, also if it runs from a checkout and is not installed, and those of
    the packages that are installed."""
    found = {"attnkit": sys.modules["attnkit"].__version__}  # an import would be upward
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
