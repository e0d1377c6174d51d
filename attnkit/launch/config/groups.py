"""Finds the folders of configurations and the choices in them, without Hydra, for the help."""

from collections.abc import Sequence
from pathlib import Path

from attnkit.lightning.errors import UserError

CONFIG_NAME = "config"
"""Name of the file conf/config.yaml, with which every composition begins."""


def folders(config_dir: Path | None) -> list[Path]:
    """Return attnkit's own conf/ and the user's folder.

    Raises:
        UserError: the user's folder does not exist, or would replace attnkit's configuration.
    """
    shipped = Path(__file__).resolve().parents[2] / "conf"
    if config_dir is None:
        return [shipped]
    if not config_dir.is_dir():
        raise UserError(f"--config-dir: no folder {config_dir}")
    if (config_dir / f"{CONFIG_NAME}.yaml").exists():
        raise UserError(
            f"--config-dir: {config_dir}/{CONFIG_NAME}.yaml would replace attnkit's own\n"
            "  give it another name, or put it into a folder such as task/"
        )
    return [shipped, config_dir]


def groups(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Return each group and its choices, sorted, over all folders."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/*.yaml"):
            found.setdefault(path.parent.name, set()).add(path.stem)
    found.pop("hydra", None)  # only the command line may set it
    return {name: sorted(found[name]) for name in sorted(found)}
