"""The versions that runs, exports and explanations write down."""

from importlib import metadata

import attnkit
from attnkit.lightning.versions import versions


def test_where_packages_are_not_installed(monkeypatch):
    """attnkit itself runs from a checkout too: run=explain failed there."""
    real = metadata.version

    def version(name):
        if name in ("attnkit", "timm"):
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = versions(("torch", "timm"))
    assert found == {"attnkit": attnkit.__version__, "torch": real("torch")}
