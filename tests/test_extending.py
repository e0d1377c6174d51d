"""docs/extending.md: its files, commands and protocol as they stand there."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from attnkit.launch.main import main

PAGE = (Path(__file__).parent.parent / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(COMMANDS,) = [code.splitlines() for language, _, code in BLOCKS if language == "bash"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    for _, name, code in BLOCKS:
        if name:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(code)
    words = shlex.split(command)[3:]
    quick = ["trainer.max_epochs=1", "callbacks.cost=null", "callbacks.curves=null", "run_dir=run"]
    assert main([*words, *quick]) == 0
    logged = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0].split(",")
    if "callbacks=grad_norm" in words:
        assert {"train/norm_of_all", "val/auroc", "test/auroc"} <= set(logged)
    assert ("task=rows" in words) != (tmp_path / "run" / "per_class.csv").exists()


def test_a_graph(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (writes,) = [code for _, name, code in BLOCKS if name == "write_graph.py"]
    (commands,) = [code.splitlines() for language, _, code in BLOCKS if language == "sh"]
    exec(compile(writes, "write_graph.py", "exec"), {})
    for number, command in enumerate(commands):
        quick = ["trainer.max_epochs=1", "logger.tensorboard=null", f"run_dir={number}"]
        assert main([*shlex.split(command)[3:], *quick]) == 0, capfd.readouterr().err
    assert "cat" in Path("1/per_class.csv").read_text()


def test_the_protocol():
    (described,) = [code for language, name, code in BLOCKS if language == "python" and not name]
    names: dict = {}
    exec(compile(described, "extending.md", "exec"), names)
    from attnkit.tasks.image_classification import DigitsData

    data = DigitsData()
    data.setup()
    assert names["describe"](None).keys() <= data.describe().keys()


def test_an_attention_without_partial_is_told_to_add_it(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    for name, code in ((name, code) for _, name, code in BLOCKS if name.startswith("mine/")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code.replace("_partial_: true\n", ""))
    assert main(["--config-dir", "mine", "task=spatial", "data=cells", "attention=mean_gate"]) == 2
    said = capfd.readouterr().err.splitlines()
    assert said[0].endswith("the network gives it if the file has the line")
    assert said[1:] == ["  _partial_: true", "  in attention=mean_gate"]
