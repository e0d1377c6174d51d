"""Every test: seeded, offline, one thread; data that is not there is skipped with a message."""

import gc
import importlib.util
import os
import random
import sys
from pathlib import Path
from types import ModuleType

from attnkit.launch.processes.process import SPINS

# Before torch is imported; subprocesses inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # as the command does
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of them would compile attnkit again
os.environ["ATTNKIT_LEDGER"] = "off"  # not what was measured on the machine of a developer

import numpy as np
import pytest
import torch

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = REPOSITORY.parent / "shared" / "data"

sys.dont_write_bytecode = False  # or each run compiles the assertions of all tests

gc.set_threshold(10_000, 20, 20)  # to search all that was imported takes half a second

# Folders of tests/, those with long tests first.
LONG = ("launch", "", "checks", "surgery", "lightning", "tasks")


def pytest_collection_modifyitems(items):
    """Long files first, so that at the end no process waits for another; skip what cannot run."""
    items.sort(key=lambda item: _place(item.path))
    no_data = pytest.mark.skip(reason=f"needs the maintainers' data folder, {DATA}")
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("data") and not DATA.is_dir():
            item.add_marker(no_data)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


def _place(path: Path) -> int:
    folder = path.relative_to(Path(__file__).parent).parts[0]
    folder = "" if folder == path.name else folder
    return LONG.index(folder) if folder in LONG else len(LONG)


@pytest.fixture(autouse=True)
def _seeded():
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():  # torch.manual_seed would keep a traceback for when it is
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """A file that hostile input would make, and a module that makes it when it is imported."""
    trace = tmp_path / "trace"
    (tmp_path / "canary.py").write_text(f"open({str(trace)!r}, 'w').close()\nNet = run = print\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "canary", raising=False)
    yield trace
    assert not trace.exists()
    assert "canary" not in sys.modules


@pytest.fixture(scope="session")
def flash_is_counted():
    """torch's counter of operations knows the CPU's flash kernel; that of torch 2.11 does not."""
    from torch.utils.flop_counter import FlopCounterMode

    query = torch.ones(1, 1, 3, 5)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    if not counter.get_total_flops():
        pytest.skip("this torch does not count the operations of the CPU's flash kernel")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the clone."""
    return REPOSITORY


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The maintainers' data; only for tests marked `data`."""
    return DATA


@pytest.fixture(scope="session")
def stand_in():
    """In place of a pretrained network: timm's smallest Vision Transformer (160 pixels, patch 16),
    for 11 classes, with random positions, norms and head."""
    import timm

    torch.manual_seed(0)
    network = timm.create_model("test_vit", num_classes=11).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return network


@pytest.fixture(scope="module")
def stand_in_files(stand_in, tmp_path_factory) -> Path:
    """Its weights as net.safetensors, and in the folder hf with a mean of its own; for more."""
    import timm
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("weights")
    save_file(stand_in.state_dict(), folder / "net.safetensors")
    config = {**stand_in.pretrained_cfg, "mean": (0.1, 0.2, 0.3), "num_classes": 11}
    model = {"num_classes": 11, "pretrained_cfg": config}
    timm.models.save_for_hf(stand_in, folder / "hf", model_config=model, safe_serialization=True)
    return folder


@pytest.fixture(scope="session")
def graph_files() -> ModuleType:
    """tests/graph_files.py: writers of made-up graph data."""
    path = Path(__file__).with_name("graph_files.py")
    spec = importlib.util.spec_from_file_location("graph_files", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
