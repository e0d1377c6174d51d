"""Checks for Java before a metric starts it."""

import shutil
from importlib.util import find_spec


def require_java(what: str) -> None:
    """Raise an error if pycocoevalcap, which holds the programs, or Java is missing.

    Raises:
        RuntimeError: something is missing; the message names all of it.
    """
    missing = []
    if find_spec("pycocoevalcap") is None:
        missing.append("pycocoevalcap (pip install 'attnkit[coco]')")
    if shutil.which("java") is None:
        missing.append("Java (no `java` on the PATH)")
    if missing:
        raise RuntimeError(f"{what} needs {' and '.join(missing)}")
