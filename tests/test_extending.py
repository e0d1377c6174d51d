"""docs/extending.md: its files, commands and protocol as they stand there."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from attnkit.launch.main import main

PAGE = (Path(__file__).parent.parent / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(COMMANDS,) = [code.splitlines() for language, _, code in BLOCKS if language == "bash"]


def write_files(folder, monkeypatch):
    """The files of the page, of which no test has imported one."""
    for _, name, code in BLOCKS:
        if name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(code)
    for path in (folder / "mine").glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_files(tmp_path, monkeypatch)
    words = shlex.split(command)[3:]
    less = ("callbacks.steps.cost=false", "callbacks.curves=null", "logger.tensorboard=null")
    assert main([*words, "trainer.max_epochs=1", *less, "run_dir=run"]) == 0
    logged = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert ("callbacks=grad_norm" in words) == ("train/norm_of_all" in logged)
    assert ("module._target_=auroc.WithAUROC" in words) == ("test/auroc" in logged)
    assert ("task=rows" in words) != (tmp_path / "run" / "per_class.csv").exists()


def test_tables_of_images_and_graphs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for _, name, code in BLOCKS:
        if name.startswith("write_"):
            exec(compile(code, name, "exec"), {})
    scripts = [code for language, _, code in BLOCKS if language == "sh"]
    commands = [command for script in scripts for command in script.splitlines()]
    for number, command in enumerate(commands):
        less = ["callbacks.steps.cost=false", "callbacks.curves=null", "callbacks.nodes=null"]
        quick = ["trainer.max_epochs=1", "logger.tensorboard=null", *less, f"run_dir={number}"]
        assert main([*shlex.split(command)[3:], *quick]) == 0, capfd.readouterr().err
    assert "large" in Path("1/per_label.csv").read_text()
    assert "test/r2" in json.loads(Path("2/results.json").read_text())
    assert "cat" in Path("4/per_class.csv").read_text()
    assert "odd" in Path("5/per_class.csv").read_text()


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
    write_files(tmp_path, monkeypatch)
    path = tmp_path / "mine" / "attention" / "mine.yaml"
    path.write_text(path.read_text().replace("_partial_: true\n", ""))
    assert main(["--config-dir", "mine", "task=spatial", "data=cells", "attention=mine"]) == 2
    said = capfd.readouterr().err.splitlines()
    assert said[0].endswith("the network gives it if the file has the line")
    assert said[1:] == ["  _partial_: true", "  in attention=mine"]
