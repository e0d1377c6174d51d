"""Files are read by libyaml as OmegaConf reads them, and composed once for each state of theirs."""

import io
import os
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from attnkit.launch.config import _hydra
from attnkit.launch.config.compose import Composer

SHIPPED = sorted(Composer().folders[0].glob("**/*.yaml"))
ODD = [
    "", "# nothing", "~", "a", "3", "[]", "{}", "a:", "a: ~", "a: ???", "a: ${b}\nb: 1",
    "a: 1e3", "a: 1e-3", "a: .5", "a: .5e-3", "a: 1.", "a: 1_000", "a: 1_0.5", "a: 0x1f", "a: 0o7",
    "a: 010", "a: 1:30", "a: 1:30.5", "a: .inf", "a: -.INF", "a: .nan", "a: +1", "a: -1e4",
    "a: yes", "a: No", "a: on", "a: y", "a: TRUE", "a: 'yes'", "a: \"\\u00e9\\n\"", "a: é",
    "a: 2026-11-27", "a: 2026-11-27 10:00:00", "1: a\n2.5: b\ntrue: c", "a: !!str 1",
    "a: !!float 1", "a: &x [1, 2]\nb: *x", "x: &x {a: 1}\ny: {<<: *x, b: 2}", "a: >\n  b\n  c\n",
    "a: |\n  b\n\n  c\n", "? a\n: b", "- a\n- {b: 1}", "a: {b: [1, {c: 2}]}", "a: !!set {b, c}",
    "a: !!python/object/apply:pathlib.Path [b, c]", "\ufeffa: 1", "%YAML 1.1\n---\na: 1\n...\n",
    "a: 'it''s'", "a: b # c", "a: b#c", "'a': 1", "a.b: 1", "a: http://b:1", "a: [b:c]", "{a: b:c}",
]  # fmt: skip
REFUSED = [
    "a: 1\na: 2", "a: {b: 1, 'b': 2}", "a: *b", "a: [1", "a: b: c", "a:\n\t- b", "a: '", "a: @b",
    "a: !!python/object/apply:os.getcwd []", "a: !unknown 1", "a: 1\n---\nb: 2", "a: !!int b",
    "a: \x07", "- 1\nb: 2", "? [a]\n: b", "a: ${b", "a: !!timestamp x",
]  # fmt: skip


def _of(load, text):
    """What is read, its types and order included, or the error."""
    try:
        return repr(OmegaConf.to_container(load(text)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_files_are_read_as_omegaconf_reads_them(path):
    text = path.read_text(encoding="utf-8")
    assert _of(_hydra.load, io.StringIO(text)) == _of(OmegaConf.load, io.StringIO(text))


@pytest.mark.parametrize("text", [*ODD, *REFUSED])
def test_odd_values_are_read_or_refused_as_by_omegaconf(text):
    ours = _of(_hydra.load, io.StringIO(text))
    assert ours == _of(OmegaConf.load, io.StringIO(text))
    assert text in ODD or "Error" in ours


def test_no_shipped_file_gets_to_the_slow_reader(monkeypatch):
    assert yaml.__with_libyaml__
    monkeypatch.delattr(OmegaConf, "load")
    Composer().compose(["task=vit"])


@pytest.fixture
def loader(tmp_path, monkeypatch):
    """Of the user's own two files, which are all there are; and how often they are composed."""
    GlobalHydra.instance().clear()
    (tmp_path / "model").mkdir()
    (tmp_path / "config.yaml").write_text("defaults: [model: a, _self_]\nkey: ${model.size}\n")
    (tmp_path / "model" / "a.yaml").write_text("size: 1")
    (tmp_path / "model" / "b.yaml").write_text("size: 2")
    monkeypatch.setattr(_hydra, "_COMPOSED", {})
    return _hydra.Loader(_hydra.create_config_search_path(f"file://{tmp_path}"), tmp_path)


def _composed(loader, *words):
    return loader.load_configuration("config", list(words), RunMode.RUN)


def test_a_composition_is_remembered_and_is_the_callers_own(loader, monkeypatch):
    assert _composed(loader).key == 1
    first = _composed(loader, "model=b")
    monkeypatch.setattr(_hydra._Repository, "load_config", None)  # nothing can be composed
    again = _composed(loader, "model=b")
    assert first == again
    assert first._metadata.flags == again._metadata.flags
    again.model.size = 3
    assert again.key == 3
    assert _composed(loader, "model=b").key == first.key == 2


def test_a_changed_or_new_file_and_another_folder_are_seen(loader, tmp_path, monkeypatch):
    path = tmp_path / "model" / "a.yaml"
    assert _composed(loader).key == 1
    state = path.stat().st_mtime_ns
    path.write_text("size: 5")
    os.utime(path, ns=(state, state + 1))
    assert _composed(loader).key == 5
    monkeypatch.chdir(tmp_path)
    assert _composed(loader).hydra.runtime.cwd == str(Path.cwd())


def test_what_depends_on_more_than_the_files_is_composed_again(loader, monkeypatch):
    monkeypatch.setenv("WHICH", "a")
    assert _composed(loader, "model=${oc.env:WHICH}").key == 1
    monkeypatch.setenv("WHICH", "b")
    assert _composed(loader, "model=${oc.env:WHICH}").key == 2
    loader.shipped = None
    _composed(loader)
    assert _hydra._COMPOSED == {}


def test_only_shipped_files_are_remembered(tmp_path):
    assert Composer().loader.shipped
    assert Composer(tmp_path).loader.shipped is None
