"""The commands of docs/runs.md are right, as far as that costs no training."""

import re
import shlex
from pathlib import Path

import pytest

from attnkit.launch.main import SHORT, TEMPLATE, main


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "docs" / "runs.md").read_text()


def test_the_commands_compose(page, capfd):
    commands = re.findall(r"^    python -m attnkit (.*)$", page, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command)
        if words[0] == "--config":  # its keys; a run of its own is in test_origin
            words = words[2:]
        code = main([*words, "--cfg", "job"])
        assert code == 0, (command, capfd.readouterr().err)
    assert not list(Path.cwd().iterdir())


def test_it_names_what_there_is(page, repository):
    """Files, callbacks and figures of the page, in the configuration and the code."""
    callbacks = (repository / "conf" / "callbacks" / "default.yaml").read_text()
    for name in ("found", "epochs", "steps", "progress"):
        assert f"\n{name}:" in callbacks
        assert f"{name}=null" in page
    assert "--config RUN_DIR" in TEMPLATE
    assert "attnkit --help" in SHORT
