"""Reports of sweeps, against figures that numpy computes from the same files."""

import base64
import csv
import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from attnkit.launch.sweep import ranking, report
from attnkit.launch.sweep import record as trials

LEARNING_RATES = ("1e-3", "1e-2", "0.1", "1.0")
SEEDS = (0, 1, 2)
FAILED = (4, 11)  # one seed of the second, one of the last
CONFIG = "task: vit\nrun: train\ncallbacks:\n  checkpoint: {monitor: val/accuracy, mode: max}\n"
FILES = {"table.csv", "table.md", "trials.csv", "report.md", "report.html", "parameters.png"}


def sweep_by_hand(folder, combinations, curves, *, failed=(), seeds=1, command=()):
    """A sweep as attnkit leaves it: `curves[number]` is the validation accuracy by epoch.

    A trial without a curve is waiting.
    """
    folder.mkdir()
    keys = tuple(combinations[0])
    made = [
        trials.new_trial(
            folder, keys, number, [*command, *(f"{k}={v}" for k, v in combination.items())]
        )
        for number, combination in enumerate(combinations)
    ]
    trials.write_sweep(
        trials.Sweep(folder, (*command, "x=…"), keys, tuple(made), working_dir=os.getcwd())
    )
    for trial, curve in zip(made, curves, strict=True):
        if curve is None:
            continue
        trial.folder.mkdir()
        (trial.folder / "config.yaml").write_text(CONFIG)
        rows = [f"{e},{e * 9 + 8},,{value}" for e, value in enumerate(curve)]
        metrics = "\n".join(["epoch,step,train/loss,val/accuracy", *rows, "0,8,0.5,", ""])
        (trial.folder / "metrics.csv").write_text(metrics)
        if trial.number in failed:
            (trial.folder / "error.txt").write_text("the loss is nan\n  a lower | optimizer.lr\n")
            continue
        results = {
            "val/accuracy_best": max(curve), "val/accuracy_best_std": 0.01 * (seeds > 1),
            "test/accuracy": curve[-1], "test/accuracy_std": 0.02 * (seeds > 1),
            "parameters": 7000, "seconds": 2.5 + trial.number, "num_seeds": seeds,
        }  # fmt: skip
        (trial.folder / "results.json").write_text(json.dumps(results))
        (trial.folder / "state.json").write_text('{"state": "done"}')
    return folder


def curve_of(number):
    return list(np.random.default_rng(number).uniform(0.2, 0.9, 5))


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Twelve trials, two of them failed, with `run=report`'s output and what was there before."""
    combinations = [
        {"seed": str(seed), "model.score": "dot" if lr == "0.1" else "cosine", "optimizer.lr": lr}
        for lr in LEARNING_RATES
        for seed in SEEDS
    ]
    folder = sweep_by_hand(
        tmp_path_factory.mktemp("study") / "it's a sweep",
        combinations,
        [curve_of(number) for number in range(12)],
        failed=FAILED,
        command=("task=vit", "data.root='/a b'"),
    )
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    folders = {p: p.stat().st_mtime_ns for p in folder.iterdir() if p.is_dir()}
    code = (
        "import sys\nfrom attnkit.launch.main import main\n"
        f"code = main(['run=report', 'sweep=\"' + {str(folder)!r} + '\"'])\n"
        "heavy = {'torch', 'lightning'} & set(sys.modules)\nassert not heavy, heavy\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return folder, done.stdout, {**before, **folders}


def by_hand(folder):
    """(mean, deviation, n, test mean, learning rate, numbers) of each setting, best first."""
    found = {}
    for path in folder.glob("*/results.json"):
        number, _, values = path.parent.name.partition("_")
        results = json.loads(path.read_text())
        figures = (int(number), results["val/accuracy_best"], results["test/accuracy"])
        found.setdefault(values.rpartition("optimizer.lr=")[2], []).append(figures)
    rows = []
    for lr, figures in found.items():
        numbers, best, test = np.array(sorted(figures)).T
        deviation = best.std(ddof=1)
        trial = " ".join(str(int(n)) for n in numbers)
        rows.append((best.mean(), deviation, len(best), test.mean(), lr, trial))
    return sorted(rows, reverse=True)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_is_one_made_by_hand(study):
    folder, _, _ = study
    rows, expected = read(folder / "table.csv"), by_hand(folder)
    assert sorted(n for *_, n, _, _, _ in expected) == [2, 2, 3, 3]
    assert [row["rank"] for row in rows] == ["1", "2", "3", "4", "", ""]
    assert [row["state"] for row in rows] == ["done"] * 4 + ["failed"] * 2
    assert [row["trial"] for row in rows[4:]] == ["4", "11"]
    assert all(row["error"] == "the loss is nan a lower | optimizer.lr" for row in rows[4:])
    for row, (mean, deviation, n, test, lr, numbers) in zip(rows[:4], expected, strict=True):
        assert (row["optimizer.lr"], row["trial"], row["n"]) == (lr, numbers, str(n))
        assert float(row["val/accuracy_best"]) == pytest.approx(mean, rel=1e-12)
        assert float(row["val/accuracy_best_std"]) == pytest.approx(deviation, rel=1e-12)
        assert float(row["test/accuracy"]) == pytest.approx(test, rel=1e-12)
        assert float(row["parameters"]) == 7000

    each = read(folder / "trials.csv")
    values = [float(row["val/accuracy_best"]) for row in each[:10]]
    assert values == sorted((max(curve_of(n)) for n in set(range(12)) - set(FAILED)), reverse=True)
    assert {row["trial"] for row in each} == {str(n) for n in range(12)}
    assert all(Path(row["folder"]).is_dir() for row in each)


def test_the_page_and_the_screen(study):
    folder, screen, _ = study
    mean, deviation, n, *_ = by_hand(folder)[0]
    page = (folder / "report.md").read_text()
    html = unescape((folder / "report.html").read_text())
    for text in (screen, page, html, (folder / "table.md").read_text()):
        assert f"{mean:.3f} ± {deviation:.3f}" in text
        assert "Equal in all rows: parameters 7 k." in " ".join(text.split())
        assert "Not counted: 2 failed." in " ".join(text.split())
        assert f"seeds in each: 2 to {n}" in text
    assert "- trial 4: `the loss is nan a lower | optimizer.lr`" in page
    assert "<code>the loss is nan a lower | optimizer.lr</code>" in html
    assert "](parameters.png)" in page
    assert base64.b64encode((folder / "parameters.png").read_bytes()).decode() in html
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + 4 + 2
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "2 failed; to run them again: attnkit run=retry 'sweep=" in screen


def test_the_command_of_the_best_run(study):
    folder, screen, _ = study
    best = by_hand(folder)[0]
    numbers = [int(number) for number in best[-1].split()]
    number = max(numbers, key=lambda n: max(curve_of(n)))
    seed = SEEDS[number % len(SEEDS)]
    score = "dot" if best[-2] == "0.1" else "cosine"
    own = f"seed={seed} model.score={score} optimizer.lr={best[-2]}".split()
    (line,) = [line for line in screen.splitlines() if line.startswith("  attnkit ")]
    assert shlex.split(line) == ["attnkit", "task=vit", "data.root='/a b'", *own]
    assert f"```bash\n{line.strip()}\n```" in (folder / "report.md").read_text()
    html = unescape((folder / "report.html").read_text())
    assert f"<pre><code>{line.strip()}</code></pre>" in html
    assert f"the best run, trial {number}:" in screen


def test_nothing_else_is_touched(study):
    folder, _, before = study
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    made = {p.name for p in folder.rglob("*") if p.is_file()} - {p.name for p in before}
    assert made == FILES
    assert (folder / "parameters.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_holds_texts_and_loads_nothing(tmp_path):
    """Values, errors and names of folders may come from anyone."""
    script = "<script>alert(1)</script>"
    folder = sweep_by_hand(
        tmp_path / "<b>sweep",
        [{"model.score": script}, {"model.score": "dot"}],
        [curve_of(0), curve_of(1)],
        failed={1},
    )
    (folder / "1_model.score=dot" / "error.txt").write_text(script)
    assert report.finish(folder) == 1
    page = (folder / "report.html").read_text()
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 3  # cell, command and error
    assert "<script" not in page
    assert "<b>" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)


@pytest.fixture
def rows(study):
    sweep = trials.read_sweep(study[0])
    return ranking.ranked(sweep.trials, ranking.Metric("val/accuracy", True))


def test_what_the_picture_shows(study, rows):
    metric = ranking.Metric("val/accuracy", True)
    scores, rates = report.draw(rows, metric).axes
    assert (scores.get_xlabel(), rates.get_xlabel()) == ("model.score", "optimizer.lr")
    assert (scores.get_xscale(), rates.get_xscale()) == ("linear", "log")
    points, line = rates.get_lines()[:2]
    ended = set(range(12)) - set(FAILED)
    expected = sorted((float(LEARNING_RATES[n // 3]), max(curve_of(n))) for n in ended)
    assert sorted(map(tuple, points.get_xydata())) == expected
    means = sorted((float(lr), mean) for mean, *_, lr, _ in by_hand(study[0]))
    np.testing.assert_allclose(sorted(map(tuple, line.get_xydata())), means, rtol=1e-12)


def test_few_and_many_trials_are_readable(tmp_path):
    """One trial has nothing to compare; many numbers have no means, for each has one trial."""
    lrs = [f"{x:.6f}" for x in np.random.default_rng(0).uniform(1e-4, 1e-1, 50)]
    combinations = [{"optimizer.lr": lr, "model.depth": str(n % 4)} for n, lr in enumerate(lrs)]
    curves = [curve_of(n) for n in range(49)] + [[1e9, 2e9]]
    metric = ranking.Metric("val/accuracy", True)
    for number in (2, 50):
        folder = sweep_by_hand(
            tmp_path / str(number), combinations[-number:], curves[-number:], failed={number - 1}
        )
        found = ranking.ranked(trials.read_sweep(folder).trials, metric)
        figure = report.draw(found, metric)
        assert (figure is not None) == (number == 50)
    rates, depths = figure.axes
    assert rates.get_ylim()[1] < 2  # a run that diverged does not set the scale
    assert len(rates.get_lines()) == 1
    assert list(depths.get_lines()[1].get_xdata()) == [0, 1, 2, 3]


def test_seeds_of_seeds_are_pooled():
    """Jobs of 3 and 2 seeds: as if all five values were there."""
    parts = [np.array([0.5, 0.7, 0.75]), np.array([0.2, 0.9])]
    results = [
        {"val/x_best": p.mean(), "val/x_best_std": p.std(ddof=1), "num_seeds": len(p)}
        for p in parts
    ]
    pooled = ranking.pooled(results, "val/x_best")
    values = np.concatenate(parts)
    assert pooled["num_seeds"] == 5
    assert pooled["val/x_best"] == pytest.approx(values.mean(), rel=1e-12)
    assert pooled["val/x_best_std"] == pytest.approx(values.std(ddof=1), rel=1e-12)


def test_a_metric_that_is_called_a_deviation_is_pooled():
    """val/pixel_std is a metric of its own; val/pixel_std_std would be its deviation."""
    parts = [{"val/pixel_std": 1.0, "val/x": 2.0, "val/x_std": 0.0}, {"val/pixel_std": 3.0}]
    pooled = ranking.pooled(parts, "val/x")
    assert pooled["val/pixel_std"] == 2
    assert pooled["val/x"] == 2
    assert pooled["val/pixel_std_std"] == pytest.approx(np.std([1, 3], ddof=1))
    assert "val/x_std_std" not in pooled


@pytest.mark.parametrize(
    ("swept", "pooled"),
    [
        ("0 1", ["0", "1"]),  # seeds 0 1 2, 1 2 3
        ("0 3", ["0 1"]),  # 0 1 2, 3 4 5
        ("0 2 5 3", ["0 2", "1", "3"]),  # 0 1 2 with 5 6 7, 2 3 4, 3 4 5
    ],
)
def test_a_seed_of_several_trials_counts_once(tmp_path, swept, pooled):
    """`-m seed=… seeds=3`: each trial has a folder for each of its seeds."""
    combinations = [{"seed": seed} for seed in swept.split()]
    curves = [curve_of(n) for n in range(len(combinations))]
    folder = sweep_by_hand(tmp_path / "sweep", combinations, curves, seeds=3)
    found = trials.read_sweep(folder).trials
    for trial in found:
        for seed in range(int(trial.values["seed"]), int(trial.values["seed"]) + 3):
            (trial.folder / f"seed_{seed}").mkdir()
    rows = ranking.ranked(found, ranking.Metric("val/accuracy", True))
    assert sorted(row.numbers for row in rows) == pooled
    assert all(row.results["num_seeds"] == 3 * len(row.trials) for row in rows)


@pytest.mark.parametrize(
    ("texts", "places", "scale"),
    [
        (["1e-1", "1e-3"], [1e-3, 1e-1], "log"),
        (["8", "1", "12"], [1, 8, 12], "linear"),
        (["1", "100"], [1, 100], "log"),
        (["0", "100"], [0, 100], "linear"),
        (["null", "0.1"], ["null", "0.1"], "linear"),
        (["inf", "1"], ["inf", "1"], "linear"),
    ],
)
def test_where_values_lie(texts, places, scale):
    metric = ranking.Metric()
    found = [
        trials.Trial(number, Path(), (), {"x": text}, results={metric.name: 1.0})
        for number, text in enumerate(texts)
    ]
    rows = [ranking.Row((trial,), trial.results, trial.number + 1) for trial in found]
    (axes,) = report.draw(rows, metric).axes
    assert list(axes.get_lines()[0].get_xdata(orig=True)) == places
    assert axes.get_xscale() == scale


def test_while_it_runs(tmp_path, attnkit, monkeypatch):
    """Every state is listed and only what is done counts; a picture that fails is a warning."""
    folder = sweep_by_hand(
        tmp_path / "sweep",
        [{"optimizer.lr": lr} for lr in LEARNING_RATES],
        [curve_of(0), curve_of(1), curve_of(2), None],
    )
    for number in (1, 2):
        (next(folder.glob(f"{number}_*")) / "results.json").unlink()

    def broken(*_):
        raise ValueError("no such colour")

    monkeypatch.setattr(report, "draw", broken)
    with (folder / "1_optimizer.lr=1e-2" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another process holds it
        done = attnkit("run=report", f"sweep={folder}")
    assert (done.code, done.err) == (0, "")
    assert "warning: parameters.png could not be drawn: ValueError: no such colour" in done.out
    states = [(row["trial"], row["rank"], row["state"]) for row in read(folder / "table.csv")]
    expected = [("0", "1", "done"), ("2", "", "interrupted"), ("1", "", "running")]
    assert states == [*expected, ("3", "", "waiting")]
    assert "1 running; to go on" in done.out
    assert "parameters.png" not in (folder / "report.md").read_text()
    assert not (folder / "trials.csv").exists()

    (next(folder.glob("0_*")) / "results.json").unlink()  # nothing is done yet
    done = attnkit("run=report", f"sweep={folder}")
    assert (done.code, done.err) == (0, "")
    assert "the best run" not in done.out


def test_the_command_from_another_folder(tmp_path):
    (tmp_path / "where it's from").mkdir()
    trial = trials.Trial(0, tmp_path, ("data.root=pictures", "seed=1"), {})
    sweep = trials.Sweep(
        tmp_path, (), (), (trial,), config_dir="/my folder", allow=("allow=[mine]",),
        working_dir=str(tmp_path / "where it's from"),
    )  # fmt: skip
    place, _, command = report.command_of(sweep, trial).partition(" && ")
    assert shlex.split(place) == ["cd", sweep.working_dir]
    own = ["attnkit", "data.root=pictures", "seed=1", "--config-dir", "/my folder", "allow=[mine]"]
    assert shlex.split(command) == own
