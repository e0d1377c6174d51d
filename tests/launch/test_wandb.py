"""The real Weights & Biases, offline, in the run folder."""

import json
import os
import struct
from importlib import metadata
from pathlib import Path

import pytest
import yaml

QUICK = ("callbacks.curves=null", "logger=wandb", "logger.wandb.offline=true")


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    pytest.importorskip("wandb.sdk")  # not the folder of that name
    import wandb

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    return wandb


def records(folder):
    """What W&B wrote in a run folder, a list of records for each time that it began."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its service writes the last of a run when the run has ended already
    for path in sorted(Path(folder).glob("wandb/offline-run-*/run-*.wandb")):
        found = []
        for data in stored(path.read_bytes()):
            found.append(record := Record())
            record.ParseFromString(data)
        yield path, found


def stored(data):
    """The records of a LevelDB log: blocks of 32 KiB, pieces with checksum, size and kind before
    them; W&B has its own 7 bytes before the first."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def history(found):
    return [
        {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
         for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]  # fmt: skip


def of_kind(found, kind):
    return [getattr(r, kind) for r in found if r.WhichOneof("record_type") == kind]


def test_a_run_and_its_going_on(wandb, mine):
    done = mine("run_dir=run", *QUICK)
    assert done.code == 0, done.err
    assert "wandb:" not in done.err + done.out
    done = mine("run_dir=other", "trainer.max_epochs=1", *QUICK)
    assert done.code == 0, done.err
    done = mine("resume=run", "trainer.max_epochs=3")
    assert done.code == 0, done.err
    assert "WANDB_MODE" not in os.environ
    assert wandb.run is None
    assert not Path("wandb").exists()
    (first, began), (again, went_on) = records("run")
    ((other, _),) = records("other")
    number = Path("run/wandb/id").read_text().strip()
    assert first.name == again.name == f"run-{number}.wandb"
    assert other.name != first.name
    rows = history(began)
    assert {"train/loss", "val/loss", "test/loss"} <= {key for row in rows for key in row}
    assert all("val/loss" not in row or row["epoch"] == 3 for row in history(went_on))
    (run,) = of_kind(began, "run")
    assert (run.project, run.display_name) == ("attnkit", "run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    saved = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["module"] == saved["module"]
    assert config["seed"] == 0
    assert [exit.exit_code for exit in of_kind(began, "exit")] == [0]
    assert Path("run/metrics.csv").is_file()
    assert Path("run/tensorboard").is_dir()


def test_a_failure_and_an_interruption_close_it(wandb, mine):
    for key, code in (("fail_at", 1), ("interrupt_at", 130)):
        done = mine(f"run_dir={key}", f"module.{key}=1", *QUICK)
        assert done.code == code, done
        ((_, found),) = records(key)
        assert [exit.exit_code for exit in of_kind(found, "exit")] == [1]
        assert any("val/loss" in row for row in history(found))
    assert wandb.run is None


def test_the_extra_is_named(mine, monkeypatch):
    def none(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    done = mine("run_dir=run", *QUICK)
    assert done.code == 2
    assert done.err.splitlines() == [
        "attnkit: logger.wandb: needs wandb: not installed",
        "  pip install 'attnkit[wandb]'",
    ]
    assert not Path("run").exists()


def test_without_an_account(wandb, mine, refused, monkeypatch):
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("NETRC", "/nowhere/netrc")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    done = refused(
        "logger.wandb: ", "run_dir=run", "callbacks.curves=null", "logger=wandb", by=mine
    )
    assert "logger.wandb.offline=true" in done.err
    assert len([line for line in done.err.splitlines() if line.startswith("attnkit")]) == 1
