import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def make_reference() -> ModuleType:
    """tests/metrics/make_reference.py: captions by chance, and the reference scorers."""
    return script("make_reference")


@pytest.fixture(scope="session")
def two_ranks() -> ModuleType:
    return script("two_ranks")


@pytest.fixture(scope="session")
def of_two_ranks():
    """Run two_ranks.py for the data in a folder; what each rank got."""

    def run(folder: Path) -> list[list]:
        command = [sys.executable, FOLDER / "two_ranks.py", folder]
        ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
        assert [rank.wait(timeout=200) for rank in ranks] == [0, 0]
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]

    return run


@pytest.fixture(scope="session")
def reference() -> dict:
    """What the reference scorers gave."""
    return json.loads((FOLDER / "reference.json").read_text())
