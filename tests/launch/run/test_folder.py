"""Run folders: one command each, held while it runs, and what their state says."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnkit.launch import folder as folders
from attnkit.launch.config.compose import Composer
from attnkit.launch.decide import Request, decide
from attnkit.launch.several import carry_out
from attnkit.launch.trainer import Elapsed
from attnkit.lightning import UserError
from attnkit.lightning.resume import checkpoints

HOLD = """
import sys, time
from pathlib import Path
from attnkit.launch.processes.locks import locked
with locked(Path(sys.argv[1])) as mine:
    print(mine, flush=True)
    time.sleep(600)
"""


def job_of(hers, *overrides):
    composer = Composer(hers)
    return decide(Request.read(composer, ["task=mine", "trainer.max_epochs=1", *overrides]))


def test_commands_of_one_second_have_a_folder_each(hers):
    """Decided at the same time, as when a shell or a SLURM array starts them together."""
    jobs = [job_of(hers, f"seed={seed}") for seed in range(3)]
    stamp = jobs[0].folder
    for job in jobs:
        job.config = folders.relocate(job.config, job.folder, stamp)
        job.runs = [folders.relocate(config, job.folder, stamp) for config in job.runs]
        job.folder = stamp
    for job in jobs:
        carry_out(job)
    found = [job.folder for job in jobs]
    assert found == [stamp, Path(f"{stamp}_2"), Path(f"{stamp}_3")]
    for seed, folder in enumerate(found):
        config = folders.load_config(folder)
        assert (config["seed"], config["run_dir"]) == (seed, str(folder))
        assert config["callbacks"]["checkpoint"]["dirpath"] == f"{folder}/checkpoints"
        assert (folder / "checkpoints" / "last.ckpt").is_file()
    losses = {folders.load_results(folder)["test/loss"] for folder in found}
    assert len(losses) == 3


def test_a_folder_asked_for_twice_at_once_is_given_once(hers):
    first, second = (job_of(hers, "run_dir=run") for _ in range(2))
    carry_out(first)
    before = (Path("run") / "config.yaml").read_bytes()
    with pytest.raises(UserError, match="run is not empty: another command"):
        carry_out(second)
    assert (Path("run") / "config.yaml").read_bytes() == before


def test_a_refused_command_leaves_no_folder(mine):
    assert mine("module.width=-3").code != 0
    assert mine("data.samples=1", "run_dir=a/b").code == 2
    assert not Path("outputs").exists()
    assert not Path("a").exists()


@pytest.fixture
def held_by_another():
    """Hold a lock in a process of its own; returns its number."""
    processes = []

    def hold(lock: Path) -> int:
        process = subprocess.Popen([sys.executable, "-c", HOLD, lock], stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout.readline() == b"True\n"
        return process.pid

    yield hold
    for process in processes:
        process.kill()
        process.wait()


def test_a_living_run_is_not_resumed(mine, held_by_another):
    assert mine("run_dir=run", "trainer.max_epochs=1").code == 0
    number = held_by_another(Path("run/.lock").absolute())
    before = (Path("run") / "run.log").read_bytes()
    done = mine("resume=run", "trainer.max_epochs=2")
    assert done.code == 2
    (line,) = done.err.strip().splitlines()
    assert f"resume: {Path('run').absolute()} is in use by process {number} on" in line
    assert (Path("run") / "run.log").read_bytes() == before


def test_a_run_that_is_taken_between_decision_and_start(hers, mine, held_by_another):
    assert mine("run_dir=run", "trainer.max_epochs=1").code == 0
    request = Request.read(Composer(hers), ["resume=run", "trainer.max_epochs=2"])
    job = decide(request)
    number = held_by_another(Path("run/.lock").absolute())
    with pytest.raises(UserError, match=f"resume: .* in use by process {number}"):
        carry_out(job)


@pytest.mark.slow
def test_latest_never_goes_on_beside_a_living_run(start, hers):
    """The real thing: a training under way, and its own folder resumed beside it."""
    own = ("--config-dir", hers, "task=mine", "data.samples=20000", "trainer.max_epochs=500")
    running = start(*own)
    log = "outputs/mine/*/metrics.csv"
    running.when(lambda: next(Path.cwd().glob(log), None))
    second = start("--config-dir", hers, "resume=latest").done()
    assert second.code == 2
    assert f"is in use by process {running.process.pid} on" in second.out
    assert len(list(Path("outputs/mine").iterdir())) == 1
    assert running.process.poll() is None


# --- how a run ends -------------------------------------------------------------------------------

STOP = (
    "+callbacks.early={_target_:lightning.pytorch.callbacks.EarlyStopping,"
    "monitor:val/loss,stopping_threshold:1e9}"
)


def figures(folder="run"):
    results = folders.load_results(Path(folder))
    return results["epochs"], results["steps"]


def test_early_stopping_ends_a_run(mine):
    assert mine("run_dir=run", "trainer.max_epochs=9", STOP).code == 0
    assert figures() == (1, 5)
    assert json.loads(Path("run/state.json").read_text())["ended_by"] == "callback"
    for more in ((), ("trainer.max_epochs=12",)):
        done = mine("resume=run", *more)
        assert done.code == 0
        assert "finished already" in done.out
        assert "a callback ended it" in done.out
        assert figures() == (1, 5)
    done = mine("resume=run", "callbacks.early=null", "trainer.max_epochs=3")
    assert done.code == 0, done.err
    assert figures() == (3, 15)


def test_max_steps_ends_a_run(mine):
    assert mine("run_dir=run", "trainer.max_epochs=9", "trainer.max_steps=7").code == 0
    assert figures()[1] == 7
    assert folders.load_state(Path("run"))["ended_by"] == "max_steps"
    assert "to train longer: trainer.max_steps=N with a larger N" in mine("resume=run").out
    assert figures()[1] == 7
    assert mine("resume=run", "trainer.max_steps=11").code == 0
    assert figures()[1] == 11


def test_what_a_state_says_on_the_way(mine):
    assert mine("run_dir=run", "module.fail_at=1").code == 1
    assert folders.load_state(Path("run"))["state"] == "failed"
    assert mine("run_dir=stopped", "module.interrupt_at=1").code == 130
    assert folders.load_state(Path("stopped"))["state"] == "stopped"
    assert mine("run_dir=seeds", "module.interrupt_at=1", "seeds=2").code == 130
    assert folders.load_state(Path("seeds"))["state"] == "stopped"
    assert folders.load_state(Path("seeds/seed_0"))["state"] == "stopped"


def test_a_copy_goes_on_beside_its_original(attnkit, mine, hers):
    """Its files' times are those of the copying, and its best is its own."""
    rate = "module.lr=0.0"  # of equal losses the first is the best
    assert mine("run_dir=run", "trainer.max_epochs=3", rate, "seeds=2").code == 0
    shutil.copytree("run", "copy", copy_function=shutil.copyfile)
    for part in Path("copy").glob("seed_*/checkpoints"):
        os.utime(part / "last.ckpt", (10**9, 10**9))
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    done = attnkit("--config-dir", hers, "resume=copy", "trainer.max_epochs=4")
    assert done.code == 0, done.err
    for part in ("copy/seed_0", "copy/seed_1"):
        last = Path(part, "checkpoints", "last.ckpt").absolute()
        assert f"from {last}: step 15, the furthest of 2 checkpoints" in done.out
        assert checkpoints.load(last)["global_step"] == 20
        assert checkpoints.load(last.with_name("best.ckpt"))["global_step"] == 5
        assert str(Path("run").absolute()) not in str(checkpoints.load(last)["callbacks"])
        assert f"{Path('run').absolute()}/" not in Path(part, "config.yaml").read_text()
    after = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.slow
def test_seconds_count_what_came_before(mine, monkeypatch):
    """The checkpoint that it goes on from says how long it took to come there, not the new one."""
    assert mine("run_dir=run", "trainer.max_epochs=1").code == 0
    path = Path("run/checkpoints/last.ckpt")
    content = checkpoints.load(path)
    content["callbacks"]["Elapsed"]["time_elapsed"]["train"] = 5000.0
    checkpoints.save(content, path)
    waits = lambda *args: time.sleep(4)  # noqa: E731
    monkeypatch.setattr(Elapsed, "on_train_epoch_start", waits, raising=False)
    started = time.perf_counter()
    assert mine("resume=run", "trainer.max_epochs=2").code == 0
    took = time.perf_counter() - started
    assert 5000 < folders.load_results(Path("run"))["seconds"] <= 5000 + took


def test_seconds_of_seeds_add_up(mine):
    assert mine("run_dir=run", "trainer.max_epochs=1", "seeds=2").code == 0
    parts = [folders.load_results(Path(f"run/seed_{seed}"))["seconds"] for seed in range(2)]
    assert folders.load_results(Path("run"))["seconds"] == pytest.approx(sum(parts), abs=0.02)
