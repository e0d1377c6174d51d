"""Every command of docs/recipes.md runs, as it stands there but for fewer batches."""

import re
import shlex
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attnkit.launch.main import main

TEXT = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text()
COMMANDS = re.findall(r"^python -m attnkit (.*)$", TEXT, re.MULTILINE)
SHORT = ["trainer.limit_batches=2", "trainer.max_epochs=1", "callbacks.curves=null"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader stands: her photos."""
    folder, noise = tmp_path_factory.mktemp("reader"), np.random.default_rng(0)
    for label in ("cat", "dog"):
        for index in range(12):
            path = folder / "photos" / "train" / label / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = noise.integers(0, 256, (32, 40 + index, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
    return folder


def test_there_are_commands():
    assert len(COMMANDS) >= 10


def test_callbacks_of_two_files_are_all_there(capfd):
    assert main(["--cfg", "job", "callbacks=[ema,early_stopping]"]) == 0
    said = capfd.readouterr().out
    assert "attnkit.lightning.EMA" in said
    assert "EarlyStopping" in said


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_shortened(command, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    code = main([*shlex.split(command), *SHORT])
    said = capfd.readouterr()
    assert code == 0, said.out + said.err
    assert "test: the checkpoint of the best epoch" in said.out
    assert "│ f1 " in said.out
    assert "Traceback" not in said.err
