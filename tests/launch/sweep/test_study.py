"""Studies by Optuna: the space, the settings, what survives a crash, what two sweeps share."""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from attnkit.launch.sweep import record as trials

optuna = pytest.importorskip("optuna", minversion="4")

from optuna.distributions import (  # noqa: E402
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState  # noqa: E402

from attnkit.launch.config.compose import Composer  # noqa: E402
from attnkit.launch.sweep import search  # noqa: E402
from attnkit.lightning import UserError  # noqa: E402
from attnkit.lightning.study import open_study  # noqa: E402

OPTUNA = "hydra/sweeper=optuna"
LEAN = ("callbacks.curves=null", "callbacks.steps.cost=false", "logger.tensorboard=null")
RATE = "module.lr=tag(log,interval(1e-3,1e-1))"
DIGITS = (
    "task=vit", "model.dim=16", "model.depth=1", "model.num_heads=2", "trainer.max_epochs=1",
    "trainer.limit_batches=3", "trainer.accelerator=cpu", "callbacks.progress=null", *LEAN,
)  # fmt: skip


def study_of(url):
    """The study as Optuna itself reads it."""
    return open_study(str(url), "attnkit")


# --- the space ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-4,'a b',[1,2]", CategoricalDistribution(["0.0001", "'a b'", "[1,2]"])),
        ("choice(a,b)", CategoricalDistribution(["a", "b"])),
        ("range(1,10,4)", IntDistribution(1, 9, step=4)),
        ("range(1,9,4)", IntDistribution(1, 5, step=4)),
        ("range(9,1,-4)", IntDistribution(5, 9, step=4)),
        ("range(0,1,0.1)", FloatDistribution(0.0, 0.9, step=0.1)),
        ("interval(1,8)", FloatDistribution(1.0, 8.0)),
        ("int(interval(1,8))", IntDistribution(1, 8)),
        ("tag(log,interval(1e-4,1e-2))", FloatDistribution(1e-4, 1e-2, log=True)),
        ("tag(log,int(interval(1,64)))", IntDistribution(1, 64, log=True)),
    ],
)
def test_the_space(composer, text, expected):
    (found,) = search.distributions(composer.parse([f"vars.x={text}"])).values()
    assert found == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tag(log,interval(0,1))", "a lower end above 0"),
        ("tag(log,choice(1,2))", "only tag(log,interval"),
        ("tag(exp,interval(1,2))", "tag exp"),
        ("interval(2,1)", "the lower end first"),
        ("range(1,1)", "no value"),
        ("shuffle(1,2)", "no order"),
    ],
)
def test_no_space(composer, text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        search.distributions(composer.parse([f"vars.x={text}"]))


def test_values_come_back_exactly(composer):
    """What is written in a trial's command is what was asked for, to the last bit."""
    for value in (0.1 + 0.2, 1e-17 / 3, 12345678.000000001, 3, -0.0):
        (text,) = search.texts({"++vars.x": value})
        assert composer.compose(["task=vit", text]).vars.x == value
    assert search.texts({"a": "[1,2]"}) == ["a=[1,2]"]


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hydra.sweeper.n_trails=3", "has no such key; did you mean n_trials?"),
        ("hydra.sweeper.n_trials=0", "n_trials: expected at least 1"),
        ("hydra.sweeper.sampler=tpee", "did you mean tpe?"),
        ("hydra.sweeper.sampler_options.n_startup=3", "did you mean n_startup_trials?"),
        ("hydra.sweeper.pruner=percentile", "pruner_options.percentile: missing"),
        ("hydra.sweeper.metric=test/loss", "a study must not choose by a test metric"),
        ("hydra.sweeper.metric=val/score", "the name of 'val/score' does not show"),
        ("hydra.sweeper.direction=minimize", "direction: needs hydra.sweeper.metric"),
        ("hydra.sweeper.n_jobs=2", "hydra/launcher=basic runs one at a time"),
        ("hydra.sweeper.storage=nosuch://x/y", "Optuna can't use the storage nosuch://x/y"),
        ("hydra.sweeper.n_trials=2,3", "expected one value"),
        ("callbacks.checkpoint.monitor=test/loss", "needs a validation metric"),
        ("run=check", "not with -m"),
    ],
)
def test_wrong_settings(mine, refused, given, message):
    refused(message, "-m", OPTUNA, RATE, *LEAN, given, "run_dir=sweep", by=mine)


def test_what_needs_the_study(mine):
    assert "nothing to search" in mine("-m", OPTUNA).err
    assert "optuna: a study" in mine("-m", "seed=1,2", "hydra.sweeper.n_trials=3").err
    done = mine(
        "-m", OPTUNA, RATE, "hydra.sweeper.metric=val/loss", "hydra.sweeper.direction=maximize"
    )
    assert "got max, but less of 'val/loss' is better" in done.err
    done = mine("-m", OPTUNA, RATE, "seeds=2", "hydra.sweeper.pruner=median")
    assert "leave out seeds and splits" in done.err


# --- studies --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_failed_pruned_raised_and_retried(mine, attnkit, found, hers):
    done = mine(
        "-m", OPTUNA, *LEAN, "callbacks.progress=null", "module.lr=0.3,1e-09",
        "module.fail_at=null,0", "hydra.sweeper.sampler=random", "hydra.sweeper.n_trials=4",
        "hydra.sweeper.seed=2", "hydra.sweeper.pruner=threshold",
        "hydra.sweeper.pruner_options.upper=1.4", "run_dir=sweep",
    )  # fmt: skip
    assert done.code == 1  # of those that failed
    states = found.states("sweep")
    assert set(states) == {"done", "failed", "pruned"}, done.out
    told = {"done": TrialState.COMPLETE, "failed": TrialState.FAIL, "pruned": TrialState.PRUNED}
    study = study_of("sweep/study.journal")
    assert [t.state for t in study.trials] == [told[state] for state in states]
    for mine_, theirs in zip(trials.read_sweep(Path("sweep")).trials, study.trials, strict=True):
        assert list(mine_.overrides[-2:]) == search.texts(theirs.params)
        if mine_.state == "done":
            assert theirs.value == mine_.results["val/loss_best"]
        if mine_.state == "pruned":
            assert mine_.values == {"module.lr": "1e-09", "module.fail_at": "null"}
            assert theirs.value == theirs.intermediate_values[0]
            assert mine_.error.startswith("pruned after epoch 1: val/loss")
    rows = found.rows("sweep")
    assert [row["rank"] != "" for row in rows].count(True) == states.count("done")
    assert (
        "hydra.sweeper.n_jobs=2: "
        in attnkit("-m", "resume=sweep", "--config-dir", hers, "hydra.sweeper.n_jobs=2").err
    )

    # tried again, a trial is the same one of the study, and is told its other end
    failed = states.count("failed")
    record = Path("sweep/sweep.json")
    record.write_text(record.read_text().replace('"module.fail_at=0"', '"module.fail_at=9"'))
    done = attnkit("run=retry", "sweep=sweep", "--config-dir", hers)
    assert done.code == 0, done.err
    assert "failed" not in found.states("sweep")
    study = study_of("sweep/study.journal")
    assert len(study.trials) == 4 + failed
    assert Counter(t.state for t in study.trials[4:]) == {TrialState.COMPLETE: failed}

    # the number may be raised, and counts none twice
    done = attnkit("-m", "resume=sweep", "--config-dir", hers, "hydra.sweeper.n_trials=5")
    assert "a study of 5 trials" in done.out
    assert len(found.states("sweep")) == 5
    best = Path("sweep/best.txt").read_text()
    assert best.strip() in done.out
    assert "callbacks.pruning" not in best


def test_a_sweep_that_was_moved_goes_on_though_its_storage_does_not_know_it(
    mine, attnkit, found, hers
):
    done = mine(
        "-m", OPTUNA, RATE, *LEAN, "module.interrupt_at=1", "trainer.max_epochs=2",
        "hydra.sweeper.n_trials=1", "hydra.sweeper.pruner=median",
        "hydra.sweeper.storage=s.journal", "run_dir=sweep",
    )  # fmt: skip
    assert done.code == 130, done.err
    Path("sweep").rename("moved")
    (trial,) = trials.read_sweep(Path("moved")).trials
    config = trial.folder / "config.yaml"
    config.write_text(config.read_text().replace("interrupt_at: 1", "interrupt_at: null"))
    done = attnkit("-m", "resume=moved", "--config-dir", hers)
    assert done.code == 0, done.err
    assert found.states("moved") == ["done"]


@pytest.mark.slow
def test_sweeps_of_their_own_share_a_study(mine, refused, attnkit, found, hers):
    """Two sweep folders, one database; a third with another search is refused."""
    search = ("-m", OPTUNA, *LEAN, "callbacks.progress=null", "trainer.max_epochs=1",
              "hydra.sweeper.storage=sqlite:///shared.db", "hydra.sweeper.n_trials=1")  # fmt: skip
    better = ("hydra.sweeper.metric=val/loss",)
    assert mine(*search, RATE, *better, "run_dir=one").code == 0
    joined = mine(*search, RATE, *better, "hydra.sweeper.n_trials=2", "run_dir=two")
    assert joined.code == 0, joined.err
    assert found.states("one") == ["done"]
    assert found.states("two") == ["done"]
    study = study_of("sqlite:///shared.db")
    assert [t.user_attrs["sweep"].rpartition("/")[2] for t in study.trials] == ["one", "two"]
    assert study.direction == optuna.study.StudyDirection.MINIMIZE
    again = attnkit("-m", "resume=one", "--config-dir", hers)
    assert again.code == 0
    best = Path("two/best.txt").read_text().strip()
    assert again.out.splitlines().count(f"  {best}") == 1
    refused(
        "this study has another",
        *search,
        "module.lr=interval(1e-3,1e-2)",
        *better,
        "run_dir=three",
        by=mine,
    )


KILLED = """\
import os, signal, sys
import optuna
from attnkit.launch.main import main
from attnkit.launch.sweep import study

def killed(*args):
    os.kill(os.getpid(), signal.SIGKILL)

owner = optuna.Trial if sys.argv[1] == "set_user_attr" else study
setattr(owner, sys.argv[1], killed)
main(sys.argv[2:])
"""


@pytest.mark.slow
def test_killed_while_it_asks(attnkit, found, hers):
    """Before a trial of the study is anybody's, and before it is in sweep.json."""

    def killed(where, *argv):
        command = [sys.executable, "-c", KILLED, where, "--config-dir", str(hers), *argv]
        assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL

    killed(
        "set_user_attr", "task=mine", "-m", OPTUNA, *LEAN, "callbacks.progress=null",
        "trainer.max_epochs=1", RATE, "hydra.sweeper.n_trials=1", "run_dir=sweep",
    )  # fmt: skip
    assert found.states("sweep") == []
    killed("add_trial", "-m", "resume=sweep")
    assert found.states("sweep") == []
    assert [t.state.name for t in study_of("sweep/study.journal").trials] == ["FAIL", "RUNNING"]
    done = attnkit("-m", "resume=sweep", "--config-dir", hers, "hydra.sweeper.n_trials=2")
    assert done.code == 0, done.err
    nobodys, its, chosen = study_of("sweep/study.journal").trials
    complete = TrialState.COMPLETE
    assert (nobodys.state, its.state, chosen.state) == (TrialState.FAIL, complete, complete)
    for trial, theirs in zip(trials.read_sweep(Path("sweep")).trials, (its, chosen), strict=True):
        assert theirs.value == trial.results["val/loss_best"]
        assert list(trial.overrides[-1:]) == search.texts(theirs.params)

    done = attnkit("-m", "resume=sweep", "--config-dir", hers, "hydra.sweeper.n_trials=1")
    assert done.code == 0, done.err
    assert "hydra.sweeper.n_trials=1: the study has 2 already; no more are chosen" in done.out
    assert found.states("sweep") == ["done", "done"]


@pytest.mark.slow
def test_killed_and_resumed(start, attnkit, found):
    """SIGKILL in a trial, then a process that goes on: every trial trained once, none left over."""
    number = 20
    url = "sqlite:///study.db"
    killed = start(
        "-m", *DIGITS, "optimizer.lr=tag(log,interval(1e-4,1e-2))", "data.batch_size=16,32", OPTUNA,
        f"hydra.sweeper.n_trials={number}", f"hydra.sweeper.storage={url}", "run_dir=sweep",
    )  # fmt: skip

    def in_the_middle():
        states = found.states("sweep") if Path("sweep/sweep.json").is_file() else []
        return states.count("done") >= number // 4 and "running" in states

    killed.when(in_the_middle).send(signal.SIGKILL).done()
    assert TrialState.RUNNING in [t.state for t in study_of(url).trials]

    again = attnkit("-m", "resume=sweep")
    assert again.code == 0, again.err
    sweep = trials.read_sweep(Path("sweep"))
    assert [t.state for t in sweep.trials] == ["done"] * number
    study = study_of(url)
    assert Counter(t.state for t in study.trials) == {TrialState.COMPLETE: number}
    assert len({tuple(t.params.values()) for t in study.trials}) == number
    assert {t.user_attrs["number"]: t.value for t in study.trials} == {
        t.number: t.results["val/loss_best"] for t in sweep.trials
    }
    begun = Counter(len(found.starts(t)) for t in sweep.trials)
    assert begun[1] >= number - 1
    assert set(begun) <= {1, 2}
    assert all(len(found.steps(t)) == len(set(found.steps(t))) for t in sweep.trials)

    best = shlex.split(Path("sweep/best.txt").read_text())
    assert best[0] == "attnkit"
    assert attnkit(*best[1:], "run_dir=again").code == 0
    results = json.loads(Path("again/results.json").read_text())
    assert results["val/loss_best"] == study.best_value
