"""Lint, format, types and the import contract, as configured in pyproject.toml."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# Outside the repository, and kept from run to run.
CACHE = Path(tempfile.gettempdir()) / f"attnkit-mypy-{os.getuid() if hasattr(os, 'getuid') else 0}"

CHECKS = {
    "lint": ["ruff", "check", "--no-cache", "."],
    "format": ["ruff", "format", "--check", "--no-cache", "."],
    "types": ["mypy", "--cache-dir", str(CACHE)],
}


@pytest.mark.parametrize(
    "check", [pytest.param(c, marks=[pytest.mark.slow] * (c == "types")) for c in CHECKS]
)
def test_house(check, repository):
    _run([sys.executable, "-m", *CHECKS[check]], repository)


def test_imports_run_downward(repository):
    command = "from importlinter.cli import lint_imports_command as c; c(['--no-cache'])"
    report = _run([sys.executable, "-c", command], repository)
    assert "3 kept, 0 broken" in report


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_what_ci_asks_for_is_there(repository):
    """pytest runs nothing at all where one of the names that it is given is not there."""
    lines = (repository / ".ci" / "run").read_text().partition("PROMISES=(")[2]
    promises = [line.strip().strip('"') for line in lines.partition("\n)")[0].splitlines()]
    asked = [line for line in promises if line and not line.startswith("#")]
    assert len(asked) > 50
    for promise in asked:
        path, _, name = promise.partition("::")
        text = (repository / path).read_text()
        assert f"def {name.partition('[')[0]}(" in text or not name, promise
