"""The site builds without a warning, and has every public name."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import attnkit

ROOT = Path(__file__).parent.parent
MODULES = ("", ".checks", ".finetune", ".interop", ".layers", ".lightning", ".metrics", ".models",
           ".interpret", ".surgery")  # fmt: skip


def found(dotted):
    """The object of that name, and the module and name it is defined by."""
    owner, _, name = dotted.rpartition(".")
    value = getattr(importlib.import_module(owner), name)
    return value, (getattr(value, "__module__", None), getattr(value, "__qualname__", dotted))


def test_every_public_name_is_in_the_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    listed = {found(name)[1] for name in re.findall(r"^::: (attnkit\.\S+)$", pages, re.MULTILINE)}
    public = {
        f"attnkit{module}.{name}"
        for module in MODULES
        for name in importlib.import_module(f"attnkit{module}").__all__
    }
    values = {name: found(name) for name in public}
    missing = {
        n
        for n, (value, home) in values.items()
        if not inspect.ismodule(value) and home not in listed
    }
    assert missing == set()


def test_the_zoo_has_every_choice_and_names_only_what_there_is():
    page = (ROOT / "docs" / "zoo.md").read_text()
    names = {
        name for part in re.findall(r"`([^`]+)`", page) for name in re.findall(r"[\w=]+", part)
    }
    for group in ("attention", "model", "decoder", "encoder"):
        choices = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
        missing = choices - names - {n.removeprefix(f"{group}=") for n in names} - {"captioner"}
        assert missing == set(), group
    classes = set(re.findall(r"`([A-Z]\w+)", page))
    assert len(classes) > 30
    assert {name for name in classes if not hasattr(attnkit, name)} == set()


@pytest.mark.slow
def test_it_builds(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install 'attnkit[docs]'")
    command = sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path / "site"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = [*(tmp_path / "site").rglob("*.html")]
    assert len(pages) > 25
    index = tmp_path / "site" / "search" / "search_index.js"  # which a page in a folder may load
    assert "sigmoid" in index.read_text()
    for page in pages:  # nothing is loaded from a network
        sources = re.findall(
            r"<(?:script|img|link)[^>]+(?:src|href)=[\"\']?(https?://[^\"\'> ]+)", page.read_text()
        )
        assert sources == [], page.name
        targets = re.findall(r'(?:href|src)="([^"#?]+)', page.read_text())
        inside = [t for t in targets if not re.match(r"\w+:", t) and page.name != "404.html"]
        assert [t for t in inside if not (page.parent / t).exists()] == [], page.name
        text = re.sub(r"<[^>]+>", "", page.read_text())
        assert "```" not in text, page.name  # a fence that was not understood
