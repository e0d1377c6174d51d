"""The records of conf/experiment, their listing, and running them again."""

import csv
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from attnkit.launch.command import command_line
from attnkit.launch.config.compose import Composer
from attnkit.launch.decide import Request, decide
from attnkit.launch.records import Figure, read, verdict

RECORDS = read(Composer().folders)
EXPERIMENTS = [name for name, record in RECORDS.items() if not record.script]
SCRIPTS = [name for name, record in RECORDS.items() if record.script]


def test_every_experiment_is_a_record(repository):
    files = {path.stem for path in (repository / "conf" / "experiment").glob("*.yaml")}
    assert files == set(RECORDS)
    assert len(files) >= 30


@pytest.mark.parametrize(
    "name",
    [
        *EXPERIMENTS[::3],
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in EXPERIMENTS
            if n not in EXPERIMENTS[::3]
        ),
    ],
)
def test_composes(name, tmp_path):
    record = RECORDS[name]
    job = decide(Request.read(Composer(), record.overrides(tmp_path)), tmp_path / "run")
    assert len(job.runs) == record.runs
    assert job.config["record"]["metric"] == record.metric
    assert (job.config["data"].get("root") is not None) == (record.data is not None)
    monitor = job.config["callbacks"]["checkpoint"]["monitor"]
    assert record.metric.startswith("test/")
    assert monitor.startswith("val/")


@pytest.mark.parametrize("name", RECORDS)
def test_is_complete(name, repository):
    """Figures of ours have machine and date, those of papers a URL; the header has the command."""
    record = RECORDS[name]
    assert (record.ours is None) == bool(record.why)
    if record.ours is not None:
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", record.date)
        assert "CPU cores" in record.machine or "GPU" in record.machine
        assert (record.ours.std is None) == (record.ours.runs == 1)
    assert record.url.startswith("https://") or record.paper == "docs/benchmarks.md"
    assert record.unit in ("%", "")
    header = (repository / "conf" / "experiment" / f"{name}.yaml").read_text()[:600]
    command = command_line(*record.overrides(Path("PATH") if record.data else None))
    assert (f"reproduce.name={name}" if record.script else command) in header
    assert not record.script or (repository / record.script).is_file()


def _page(repository):
    spec = importlib.util.spec_from_file_location("records", repository / "docs" / "records.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(repository):
    page = (repository / "docs" / "records.md").read_text()
    assert page == _page(repository).page(), "run python docs/records.py"


# --- the verdict ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "reference", "expected"),
    [
        (Figure(83.05, 0.37, 10), Figure(83.0, 0.7, 100), "within spread"),
        (Figure(71.0, 0.64, 10), Figure(72.5, 0.7, 100), "below"),
        (Figure(94.3, 0.33, 10), Figure(93.91, 0.35, 10), "within spread"),
        (Figure(95.3, 0.33, 10), Figure(93.91, 0.35, 10), "above"),
        (Figure(3.0, 0.3), Figure(2.5, 0.4), "within spread"),  # 0.5 = √(0.3² + 0.4²)
        (Figure(3.01, 0.3), Figure(2.5, 0.4), "above"),
        (Figure(99.6, runs=1), Figure(100), "within spread"),  # half a unit of the last digit
        (Figure(99.4, runs=1), Figure(100), "below"),
        (Figure(90.9), Figure(91.01), "below"),
        (Figure(82.0, runs=1), Figure(83.78, 0.43, 10), "below"),  # of one run: their spread alone
        (Figure(5e-16), Figure(0.0, tolerance=1e-12), "within spread"),
        (Figure(5e-11), Figure(0.0, tolerance=1e-12), "above"),
    ],
)
def test_verdict(new, reference, expected):
    assert verdict(new, reference) == expected


# --- the command ----------------------------------------------------------------------------------


def test_lists_all_in_80_columns_without_torch():
    code = (
        "import sys; from attnkit.launch.main import main; code = main(['run=reproduce']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    first = [line.split(" ")[0] for line in lines]
    assert set(RECORDS) <= set(first)
    cora = next(line for line in lines if line.startswith("cora "))
    assert "83.0 ± 0.7" in cora
    assert cora.rstrip().endswith("data")
    assert os.listdir(".") == []


def test_no_name_at_all(refused):
    refused("reproduce.name=[]: expected at least one name", "run=reproduce", "reproduce.name=[]")


@pytest.fixture
def own(hers, tmp_path, monkeypatch):
    """Writes records of one's own and runs a command with them."""
    monkeypatch.chdir(tmp_path)
    folder = Path(hers) / "experiment"
    folder.mkdir()

    def run(attnkit, records, *argv):
        for name, content in records.items():
            record = {"what": "her loss", "metric": "test/loss", "paper": "hers", "table": "1",
                      "unit": "", "why": "not yet"} | content.pop("record", {})  # fmt: skip
            text = yaml.safe_dump({**content, "record": record}, allow_unicode=True)
            (folder / f"{name}.yaml").write_text(f"# @package _global_\n# {name}\n{text}")
        return attnkit("--config-dir", hers, "run=reproduce", *argv)

    yield run
    shutil.rmtree(folder)


OF_HERS = {"defaults": [{"override /task": "mine"}], "seeds": 2}


def _rows(folder):
    with Path(folder, "table.csv").open(newline="") as file:
        return {row["record"]: row for row in csv.DictReader(file)}


@pytest.mark.slow
def test_runs_writes_a_table_and_goes_on_after_a_failure(attnkit, own, tmp_path):
    published = {"mean": 0.0, "std": 0.1, "runs": 3}
    fails = {**OF_HERS, "module": {"fail_at": 0}}
    there_are = {
        "fails": fails,
        "far": {**OF_HERS, "record": {"published": published}},
        "of_no_such_metric": {**OF_HERS, "record": {"metric": "test/fame"}},
    }
    done = own(attnkit, there_are, "reproduce.name=[fails,far,of_no_such_metric]", "run_dir=here")
    assert done.code == 1
    assert "attnkit: fails: RuntimeError: this module fails on purpose" in done.err
    rows = _rows("here")
    assert [*rows] == ["fails", "far", "of_no_such_metric"]
    assert rows["fails"]["state"] == "failed"
    assert "on purpose" in rows["fails"]["error"]
    results = json.loads(Path("here/far/results.json").read_text())
    assert float(rows["far"]["now"]) == pytest.approx(results["test/loss"], rel=0.01)
    assert float(rows["far"]["now_std"]) == pytest.approx(results["test/loss_std"], rel=0.1)
    assert (rows["far"]["runs"], rows["far"]["verdict"]) == ("2", "above")
    assert rows["far"]["against"] == "published"
    assert "test/fame: not among the results" in rows["of_no_such_metric"]["error"]
    markdown = Path("here/table.md").read_text().splitlines()
    assert len(markdown) == 5
    assert "| far | 0.0 ± 0.1 |" in markdown[3]
    assert "above" in done.out
    assert "within spread: |now - reference|" in done.out


@pytest.mark.slow
def test_against_what_is_on_record_where_nothing_is_published(attnkit, own):
    ours = {"mean": 1.1, "std": 5.0, "runs": 2}
    record = {"ours": ours, "date": "2026-11-23", "machine": "hers", "why": None}
    done = own(attnkit, {"near": {**OF_HERS, "record": record}}, "reproduce.name=near",
               "run_dir=here", "seeds=3")  # fmt: skip
    assert done.code == 0, done.err
    row = _rows("here")["near"]
    assert (row["verdict"], row["against"], row["runs"]) == ("within spread", "on record", "3")


def test_as_many_as_fit_and_have_their_data(attnkit, own, monkeypatch):
    """Of a time that no record of ours fits."""
    quick = {"minutes": 0.001, "unit": ""}
    done = own(
        attnkit,
        {
            "quick": {**OF_HERS, "record": quick},
            "slow": {**OF_HERS, "record": {**quick, "minutes": 0.0015}},
            "without_data": {**OF_HERS, "record": {**quick, "data": {"folder": "x", "file": "y"}}},
        },
        "reproduce.minutes=0.002",
        "run_dir=here",
    )
    assert done.code == 0, done.err
    assert [*_rows("here")] == ["quick"]
    assert re.search(r"more time than is left of 0.002 minutes: .*slow", done.out)
    assert re.search(r"its files, data.root=PATH: .*without_data", done.out)
    assert re.search(r"a time on record: .*pubmed|its files, data.root=PATH: .*pubmed", done.out)


def test_a_script_of_ones_own(attnkit, own, hers):
    """Below the folder that holds the folder of configurations."""
    script = Path(hers).resolve().parent / "hers.py"
    script.write_text(
        "from pathlib import Path\n"
        "def main(seed, picture):\n    Path(picture).touch()\n    return 1.5 + seed\n"
    )
    record = {"script": "hers.py", "metric": "marks", "published": {"mean": 2.0}}
    done = own(attnkit, {"scripted": {"seeds": 2, "record": record}}, "reproduce.name=scripted",
               "run_dir=here")  # fmt: skip
    assert done.code == 0, done.err
    row = _rows("here")["scripted"]
    assert (float(row["now"]), row["verdict"]) == (2.0, "within spread")
    assert Path("here/scripted/seed_1.png").exists()
    script.unlink()
    done = own(attnkit, {}, "reproduce.name=scripted", "run_dir=again")
    assert done.code == 2
    assert "scripted: no file" in done.err
    assert not Path("again").exists()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"metrik": 1}, r"record\.metrik: record has no such key; did you mean metric"),
        ({"what": None}, r"record\.what: missing"),
        ({"why": None}, r"record\.why: missing; say why nothing was measured"),
        ({"ours": {"mean": 1.0}}, "a measured figure needs its date and machine"),
        ({"published": {"mean": "much"}}, r"published\.mean: expected .*, got 'much'"),
        ({"published": 83.0}, r"record\.published: expected a mapping, got 83.0"),
        ({"data": {"folder": "x"}}, r"record\.data\.file: missing"),
    ],
)
def test_an_incomplete_record(attnkit, own, record, message):
    done = own(attnkit, {"broken": {**OF_HERS, "record": record}})
    assert done.code == 2
    assert re.search(message, done.err), done.err
    assert "broken.yaml" in done.err


# --- the examples, and short records as they are --------------------------------------------------


@pytest.mark.parametrize("name", ["nadaraya_watson", "permutation"])
def test_an_example_draws_its_picture(name, repository, tmp_path):
    spec = importlib.util.spec_from_file_location(name, repository / RECORDS[name].script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    picture = tmp_path / "picture.png"
    value = module.main(picture=str(picture))
    assert picture.stat().st_size > 10_000
    assert value < (1e-12 if name == "permutation" else 0.1)
