import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture(scope="session")
def make_reference() -> ModuleType:
    """tests/metrics/make_reference.py: captions by chance, and the reference scorers."""
    spec = importlib.util.spec_from_file_location("make_reference", FOLDER / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def reference() -> dict:
    """What the reference scorers gave."""
    return json.loads((FOLDER / "reference.json").read_text())
