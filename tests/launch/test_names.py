"""A name stays what it is, through command lines, configurations and files."""

import csv
import io
import json
import logging
import os
import random
import shlex
import subprocess
import sys
import unicodedata
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image
from rich.console import Console
from rich.table import Table

import attnkit as toolkit
from attnkit.launch import folder as folders
from attnkit.launch.command import command_line, quoted, setting
from attnkit.launch.config.compose import Composer, readable
from attnkit.launch.console import logging_to
from attnkit.launch.decide import Request, decide
from attnkit.launch.errors import fail
from attnkit.launch.processes.process import command_of, print_anything
from attnkit.launch.sweep.record import read_sweep
from attnkit.lightning import UserError
from attnkit.lightning.console import cell, in_line, say, visible
from attnkit.lightning.files import write_csv, write_text

# Names that people give files, folders and classes, and that nothing may change.
NAMES = (
    "???", "a${b}", "${oc.env:ATTNKIT_SECRET}", "a\\${b}", "a\\\\${b}", "${", "$a$b", "$x$", "a\\",
    "\\", "a\\'b", 'a\\"b', "'", '"', "'a'", '"a"', "it's", "`id`", "$(id)", "[bold]red[/bold]",
    "[/]", "{a: 1}", "[1, 2]", "<b>", "&amp;", "=1+1", "=cmd|' /C calc'!A0", "+a", "-a", "--help",
    "-1.5", "@a", "1e3", "0x10", "1_000", "12:30", "2020-01-01", "null", "true", "no", "~", "*a",
    "&a", "!a", "%a", "#a", "a#b", "a: b", "- a", "? a", "a,b", "a=b", "a;b", "a|b", " a", "a ",
    "a  b", "a\nb", "\n", "a\tb", "a\rb", "\x1b]0;x\x07", "\x1b[31ma", "\x7f", "\x9b31m",
    "\u202eabc", "\u2028", "\ufeffa", "é", "e\u0301", "日本", "हिन्दी", "می\u200cخواهم",
    "👩\u200d🔬", "caf\udce9", "\udcff", "x" * 200, "nul", ".a", "..a", "a.b", "a.", "latest",
    "train", "_target_",
)  # fmt: skip


def drawn(count: int, seed: int = 0) -> list[str]:
    """Random ones of the letters that something reads in its own way."""
    letters = 'ab  \\\\\\$${}{}\'""[],:=#?~-+@%&*!|`\n\t\x1bé\u0301\u202e\udce9'
    draw = random.Random(seed)
    return ["".join(draw.choices(letters, k=draw.randint(1, 12))) for _ in range(count)]


ALL = (*NAMES, *drawn(120))


@pytest.fixture(scope="module")
def composer():
    return Composer()


def read(composer, override):
    """The value of an override, as a command line gives it."""
    (parsed,) = composer.parse([readable(override)])
    config = OmegaConf.create({})
    OmegaConf.update(config, "key", parsed.value())
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)["key"]


def test_overrides_and_printed_commands(composer, monkeypatch):
    monkeypatch.setenv("ATTNKIT_SECRET", "secret")
    for name in ALL:
        for mark in "'\"":
            assert read(composer, f"key={quoted(name, mark)}") == name
        path = Path("/folder", name.replace("/", "_"))
        line = command_line(setting("ckpt", path)).encode("utf-8", "surrogateescape")
        assert read(composer, shlex.split(line.decode("utf-8", "surrogateescape"))[1]) == str(path)


def test_paths_as_they_are_typed(composer):
    """One that is there, and one with letters that Hydra does not know."""
    for name in ALL:
        if len(os.fsencode(name)) < 255 and name[0] not in "'\"" and name not in ("null", "true"):
            folder = Path("in", name)
            folder.mkdir(parents=True, exist_ok=True)
            assert read(composer, f"ckpt=in/{name}") == f"in/{name}"
    for key in ("run_dir", "data.root", "+model.name"):
        assert read(composer, f"{key}=/home/josé/हिन्दी/e\u0301 x") == "/home/josé/हिन्दी/e\u0301 x"


@pytest.mark.parametrize("how", ["resume", "ckpt", "--config"])
def test_a_saved_configuration_is_data(composer, monkeypatch, how):
    """Nothing in it is looked up, in the environment or elsewhere; nothing is missing."""
    monkeypatch.setenv("ATTNKIT_SECRET", "secret")
    run = Path("a${b}\\${oc.env:ATTNKIT_SECRET}").absolute()
    names = [*ALL, f"{run}/${{x}}"]
    first = decide(Request.read(composer, ["task=vit", setting("run_dir", run)]))
    assert first.folder == run
    assert first.config["callbacks"]["checkpoint"]["dirpath"] == f"{run}/checkpoints"
    config = first.config | {"module": {**first.config["module"], "class_names": names}}
    folders.save_config(run, config)
    assert folders.load_config(run) == config
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "best.ckpt").touch()
    if how == "resume":
        job = decide(Request.read(composer, [setting("resume", run), "trainer.max_epochs=9"]))
    elif how == "ckpt":
        job = decide(Request.read(composer, ["run=test", setting("ckpt", run)]))
        assert job.config["ckpt"] == str(run / "checkpoints" / "best.ckpt")
    else:
        words = [setting("init", run), setting("run_dir", run.with_name("${new}"))]
        job = decide(Request.read(composer, words, base=run / "config.yaml"))
        assert job.config["init"] == str(run / "checkpoints" / "best.ckpt")
    places = [name.replace(str(run), str(job.folder)) for name in names]
    assert job.config["module"]["class_names"] == places
    assert job.config["callbacks"]["checkpoint"]["dirpath"] == f"{job.folder}/checkpoints"


def unseen(text):
    """What a terminal would obey or could not show."""
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"] + [
        c for c in text if c in "\u202e\u2028\ufeff"
    ]


def test_nothing_in_a_name_reaches_a_terminal_or_a_log(tmp_path, monkeypatch):
    screen, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr("rich.get_console", lambda: Console(file=screen))
    monkeypatch.setattr(sys, "stderr", errors)
    # pytest keeps what is logged, and its workers cannot send names that are not UTF-8
    for name in (None, "attnkit", "attnkit.run"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    table = Table("name")
    with logging_to(tmp_path):
        logging.getLogger("attnkit.run").setLevel(logging.INFO)
        for name in ALL:
            say(name)
            table.add_row(cell(name))
            fail(UserError(f"{name}: no such class"), 2)
            with suppress(UserError), logging_to(tmp_path):
                raise UserError(name)
            assert not unseen(visible(name))
            assert "\n" not in in_line(name)
    Console(file=screen, width=300, color_system=None).print(table)
    for text in (screen.getvalue(), errors.getvalue(), (tmp_path / "run.log").read_text()):
        assert r"\x1b]0;x\x07" in text
        assert r"caf\udce9" in text
        assert "[bold]red[/bold]" in text
        assert "می\u200cخواهم" in text
        assert not unseen(text)


def guarded(name):
    """As a table has it."""
    shown = name.encode("utf-8", "backslashreplace").decode()
    return f"'{shown}" if shown[0] in "=+@\t\r-" and shown != "-1.5" else shown


def test_tables_hold_no_formula_and_every_name(tmp_path):
    """Numbers stay numbers, whatever their sign; who reads the rest takes one apostrophe away."""
    rows = [(name, f"{-i / 7:.3f}", -i) for i, name in enumerate(ALL)]
    write_csv(tmp_path / "a.csv", ["=name", "score", "count"], rows)
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        header, *found = csv.reader(file)
    assert header == ["'=name", "score", "count"]
    for (name, score, count), (text, *numbers) in zip(rows, found, strict=True):
        assert numbers == [score, str(count)]
        assert text[:1] not in ("=", "+", "@", "-", "\t", "\r") or float(text) < 0
        guarded = text[:1] == "'" and not name.startswith("'")
        shown = name.encode("utf-8", "backslashreplace").decode()
        assert text.removeprefix("'" if guarded else "") == shown


def test_files_hold_every_name(tmp_path):
    for write in (json.dumps, lambda names: json.dumps(names, ensure_ascii=False)):
        write_text(tmp_path / "a.json", write(ALL))
        assert json.loads((tmp_path / "a.json").read_text("utf-8")) == list(ALL)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_output_of_any_encoding(monkeypatch, encoding):
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    print_anything()
    print("–", *ALL)
    table = Table("name", *map(cell, ALL[:9]), title="–")
    Console().print(table)
    sys.stdout.flush()
    text = streams[0].buffer.getvalue().decode(encoding)
    assert ("–" if "–".encode(encoding, "ignore") else r"\u2013") in text
    assert r"caf\udce9" in text


def test_a_process_imports_from_where_this_one_does(monkeypatch):
    """Nothing from the working directory, which `python -m` would put first."""
    Path("statistics.py").write_text("raise SystemExit('the one here was imported')")
    Path("asked.py").write_text(
        "import statistics, sys\ndef main(argv):\n    print(ascii(sys.path), argv[0])\n    return 7"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, "é\udce9'", str(Path.cwd())])
    done = subprocess.run(command_of("asked", "x"), capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (f"{sys.path!a} x\n", 7), done.stderr


SHADOWING = ("statistics", "queue", "data", "token", "random", "csv", "torch", "yaml", "tasks")
LEAN = (
    "model.depth=1", "model.dim=16", "model.num_heads=2", "trainer.limit_batches=2",
    "trainer=cpu", "callbacks.curves=null", "callbacks.steps.cost=false", "data.num_workers=0",
)  # fmt: skip


@pytest.mark.slow
def test_from_training_to_export(start, monkeypatch):
    """Every name as class, file and folder; output in ASCII; a folder full of shadowing files."""
    here = Path("josé ${oc.env:ATTNKIT_SECRET} 'e\u0301\"")
    here.mkdir()
    monkeypatch.chdir(here)
    for name in SHADOWING:
        Path(f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    names = sorted({name for name in NAMES if "/" not in name and name[0] != "."})
    for split in ("train", "val", "test", "new"):
        for number, name in enumerate(names):
            folder = Path("images", split) if split == "new" else Path("images", split, name)
            folder.mkdir(parents=True, exist_ok=True)
            pixels = np.full((8, 8, 3), 3 * number, np.uint8)
            file = folder / (f"{name}.png" if split == "new" else f"{number}.png")
            with file.open("wb") as stream:
                Image.fromarray(pixels).save(stream, "png")

    def run(*argv):
        done = start(*argv, PYTHONIOENCODING="ascii", ATTNKIT_SECRET="secret").done()
        assert done.code == 0, done.out
        assert done.out.isascii()
        assert not unseen(done.out)
        assert "secret" not in done.out

    def classes(folder):
        return folders.load_config(Path(folder))["module"]["class_names"]

    image_data = ("data=image_folder", "data.root=images", "data.image_size=8")
    run(*LEAN, *image_data, "trainer=cpu_ddp", "trainer.max_epochs=1", "run_dir=run")
    assert classes("run") == names
    run("resume=run", "trainer.max_epochs=2")
    assert classes("run") == names
    run("--config", "run", "trainer.max_epochs=1", "run_dir=again")
    assert classes("again") == names
    run("run=test", "ckpt=run", "run_dir=tested")
    with Path("tested/per_class.csv").open(newline="", encoding="utf-8") as file:
        shown = [row["class"] for row in csv.DictReader(file)]
    assert [guarded(name) for name in names] == shown
    run("run=predict", "ckpt=run", "images=images/new", "run_dir=predicted")
    with Path("predicted/predictions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    shown = [name.encode("utf-8", "backslashreplace").decode() for name in names]
    assert sorted(Path(row["path"]).name for row in rows) == sorted(f"{n}.png" for n in shown)
    assert {row["label"] for row in rows} <= {guarded(name) for name in names}
    run("run=explain", "ckpt=run", "images=images/new", "run_dir=explained")
    run("run=export", "ckpt=run", "run_dir=exported", "export.formats=[]")
    assert toolkit.load("exported").class_names == names
    run("-m", *LEAN, *image_data, "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2",
        "trainer.max_epochs=1", "run_dir=sweep")  # fmt: skip
    assert [classes(trial.folder) for trial in read_sweep(Path("sweep")).trials] == [names] * 2
    texts = [path for path in Path.cwd().rglob("*") if path.suffix in (".log", ".csv", ".yaml")]
    assert len(texts) > 9
    for path in texts:
        text = path.read_text("utf-8")
        assert "secret" not in text
        assert path.suffix == ".csv" or "\x1b" not in text
        assert path.suffix != ".log" or not unseen(text)
