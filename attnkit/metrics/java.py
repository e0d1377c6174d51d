"""Checks for Java before a metric starts it."""

import shutil
from importlib.util import find_spec


def require_java(what: str) -> None:
    """Raise where pycocoevalcap, which brings the programs, or the Java to run them is missing.

    Raises:
        RuntimeError: with all that is missing.
    """
    missing = []
    if find_spec("pycocoevalcap") is None:
        missing.append("pycocoevalcap (pip install 'attnkit[coco]')")
    if shutil.which("java") is None:
        missing.append("Java (no `java` on the PATH)")
    if missing:
        raise RuntimeError(f"{what} needs {' and '.join(missing)}")
