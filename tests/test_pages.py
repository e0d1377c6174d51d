"""Every block of code and command in the README and the pages runs, as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import attnkit

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
NAMED = ("index", "attention", "coming_from", "doctor")
PAGES = [README, *sorted((ROOT / "docs").glob("tutorials/*.md"))]
PAGES += [ROOT / "docs" / f"{name}.md" for name in NAMED]
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(page, *block) for page in PAGES for block in BLOCK.findall(page.read_text())]


def _is_long(code):
    """It trains a model, or judges one of full size."""
    return "attnkit.run(" in code or "attnkit.trust(" in code


SNIPPETS = [
    pytest.param(code, id=f"{page.stem}-{number}", marks=[pytest.mark.slow] * _is_long(code))
    for number, (page, language, name, code) in enumerate(BLOCKS)
    if language == "python" and not name
]
COMMANDS = {
    page: [
        line
        for of, language, _, code in BLOCKS
        if of == page and language == "bash"
        for line in code.splitlines()
    ]
    for page in PAGES
}
# Of several pages, minutes long, and the same in every folder: it runs for the README.
DOCTOR = "python -m attnkit doctor --quick"
# Installing is what CI does before these tests.
SET_UP = re.compile(r"git clone \S+( \S+)* && cd \S+|pip install -e \S+ && pytest")
RUN = [
    pytest.param(page, line.removeprefix("pip install -e . && "), id=f"{page.stem}: {line}")
    for page, lines in COMMANDS.items()
    for line in lines
    if not SET_UP.fullmatch(line) and (page == README or line != DOCTOR)
]


def test_names_beside_other_libraries():
    rows = re.findall(r"^\| .* \| (.*) \|$", (ROOT / "docs/coming_from.md").read_text(), re.M)
    ours = [row for row in rows if "PyG's" not in row and "not here" not in row]
    name_of_ours = re.compile(r"(?<!\.)\b([A-Z]\w*[a-z]\w*)\b(?=[(`])")
    names = {name for row in ours for name in name_of_ours.findall(row)}
    assert len(names) > 15
    assert not {name for name in names - {"True"} if not hasattr(attnkit, name)}


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippets(code, tmp_path, monkeypatch):
    if "from transformers import" in code:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(code, "page", "exec"), {"__name__": "__main__"})
    runs = {"outputs", "runs", "seen.png"} if "attnkit.run(" in code else set()
    assert {path.name for path in tmp_path.iterdir()} <= runs


def test_shown_examples_are_the_ones_that_are_tested():
    shown = {name: code for _, _, name, code in BLOCKS if name}
    assert "docs/examples/plain_trainer.py" in shown
    for name, code in shown.items():
        assert code == (ROOT / name).read_text()


def test_the_set_up_is_what_ci_does():
    assert "pip install -e . && python -m attnkit task=vit" in COMMANDS[README]
    assert {"pip install -e '.[dev]' && pytest", DOCTOR} < {*COMMANDS[README]}
    ci = (ROOT / ".ci" / "run").read_text()
    assert "pip install" in ci
    assert "-e '.[dev]'" in ci
    assert 'pytest "$@"' in ci


def test_the_readme_is_read_to_the_end():
    assert len(README.read_text().split()) <= 900


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """For each page where a reader stands: her photos, the repository's docs, and nothing else."""
    folders = {}

    def stands(page):
        if page not in folders:
            folder = folders[page] = tmp_path_factory.mktemp("reader")
            (folder / "docs").symlink_to(ROOT / "docs")
            for split, count in (("train", 12), ("val", 4), ("test", 4)):
                for index in range(count):
                    for label, colour in (("cat", (200, 120, 40)), ("dog", (90, 90, 100))):
                        path = folder / "photos" / split / label / f"{index}.png"
                        path.parent.mkdir(parents=True, exist_ok=True)
                        shade = tuple(value + 5 * index for value in colour)
                        Image.new("RGB", (40 + index, 32), shade).save(path)
        return folders[page]

    return stands


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), RUN)
def test_commands(page, command, reader):
    """In the order of the page, in one folder: later ones use what earlier ones left.

    They train for a few steps: what comes out is held by records and by tests of the runs.
    """
    if re.search(r"attnkit .*\btask=", command) and "run=check" not in command:
        command += " trainer.max_epochs=1 trainer.limit_batches=4"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=reader(page), env={**os.environ, "PATH": path},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr


def test_pictures_and_links_of_the_readme_are_there():
    targets = re.findall(r"\]\(([^)]+)\)|src(?:set)?=\"([^\"]+)", README.read_text())
    targets = [markdown or html for markdown, html in targets]
    assert targets
    for target in targets:
        path, _, section = target.partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.M) if section else []
        assert (ROOT / path).exists(), target
        assert not section or section in [re.sub(r"\W+", "-", h.lower()) for h in headings], target


def test_pictures_are_small_and_shown():
    shown = "".join(page.read_text() for page in [README, *(ROOT / "docs").rglob("*.md")])
    pictures = list((ROOT / "docs").glob("*.png"))
    assert pictures
    for path in pictures:
        assert path.stat().st_size < 300_000, path.name
        assert path.name in shown, path.name
