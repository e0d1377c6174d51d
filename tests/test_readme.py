"""Every block of code in the README runs, as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", (ROOT / "README.md").read_text(),
                    re.MULTILINE | re.DOTALL)  # fmt: skip
FILES = {name: code for _, name, code in BLOCKS if name}
SNIPPETS = [code for language, name, code in BLOCKS if language == "python" and not name]
COMMANDS = [
    line for language, _, code in BLOCKS if language == "bash" for line in code.splitlines()
]
# Installing is what CI does before these tests.
SET_UP = re.compile(r"git clone \S+( \S+)* && cd \S+|pip install -e \S+ && pytest")
RUN = [c.removeprefix("pip install -e . && ") for c in COMMANDS if not SET_UP.fullmatch(c)]


@pytest.mark.parametrize("code", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert [path.name for path in tmp_path.iterdir()] in ([], ["seen.png"])


def test_the_plain_trainer_is_the_one_that_is_tested():
    name = "docs/examples/plain_trainer.py"
    assert FILES[name] == (ROOT / name).read_text()


def test_the_set_up_is_what_ci_does():
    assert "pip install -e . && python -m attnkit task=vit" in COMMANDS
    assert "pip install -e '.[dev]' && pytest" in COMMANDS
    ci = (ROOT / ".ci" / "run").read_text()
    assert "pip install" in ci
    assert "-e '.[dev]'" in ci
    assert 'pytest "$@"' in ci


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader stands: her photos, the files that the README shows, and nothing else."""
    folder = tmp_path_factory.mktemp("reader")
    for split, count in (("train", 12), ("val", 4), ("test", 4)):
        for index in range(count):
            for label, colour in (("cat", (200, 120, 40)), ("dog", (90, 90, 100))):
                path = folder / "photos" / split / label / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                shade = tuple(value + 5 * index for value in colour)
                Image.new("RGB", (40 + index, 32), shade).save(path)
    for name, code in FILES.items():
        if not name.startswith("docs/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(code)
    return folder


def in_its_own(command, folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command, shell=True, cwd=folder, env={**os.environ, "PATH": path},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def _check(done):
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_commands(command, folder):
    """In the order of the README, in one folder: later ones use what earlier ones left."""
    _check(in_its_own(command, folder))


def test_pictures_and_links_are_there():
    readme = (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^)]+)\)", readme)
    assert targets
    for target in targets:
        path, _, section = target.partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.M) if section else []
        assert (ROOT / path).exists(), target
        assert not section or section in [re.sub(r"\W+", "-", h.lower()) for h in headings], target
