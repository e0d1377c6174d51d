"""Every argument of Trainer, once: it works, or one line says why not."""

import json
from pathlib import Path

import pytest
import torch

from attnkit.launch import folder as folders
from attnkit.launch.config.compose import Composer
from attnkit.launch.decide import Request, decide
from attnkit.launch.modes import MODES
from attnkit.launch.trainer import make_trainer
from attnkit.lightning import (
    BestCheckpoint,
    ExactAccumulation,
    LastCheckpoint,
    Meter,
    SafeCheckpoints,
)

WORKS = 0
# Of arguments that change what attnkit does a value, and the line of its refusal.
QUICK = [
    ("overfit_batches=2", WORKS),
    ("max_time={microseconds: 1}", WORKS),
    ("enable_model_summary=true", WORKS),
    ("fast_dev_run=true", WORKS),
    ("max_steps=3", WORKS),
    ("limit_val_batches=0", WORKS),
    ("max_time=1h", "Expected a string in the format DD:HH:MM:SS"),
    ("max_steps=0", "trainer.max_steps: expected at least 1, or -1 for no end, got 0"),
    ("limit_train_batches=0", "trainer.limit_train_batches: expected more than 0, got 0"),
    ("precision=16", "set elsewhere: precision"),
    ("logger=false", "set elsewhere: logger.<name>"),
    ("callbacks=null", "set elsewhere: callbacks.<name>"),
    ("default_root_dir=x", "set elsewhere: run_dir"),
    ("enable_checkpointing=false", "set elsewhere: callbacks.checkpoint"),
    ("limit_predict_batches=1", "has no effect in run=train"),
    ("barebones=true", "trainer.barebones: not used here: it leaves out callbacks"),
    ("model_registry=x", "trainer.model_registry: not used here: it uploads"),
    ("plugins=x", "trainer.plugins: expected"),
    ("profiler=nosuch", "can only be one of"),
    ("gradient_clip_algorithm=x", "`gradient_clip_algorithm` x is invalid"),
    ("strategy=nosuch", "invalid strategy name"),
    ("accelerator=nosuch", "invalid accelerator name"),
    ("num_nodes=2", "nothing has started the processes"),
]


@pytest.mark.parametrize(("text", "answer"), QUICK)
def test_every_argument(mine, text, answer):
    done = mine("run_dir=run", "callbacks.steps.cost=false", f"trainer.{text}")
    if answer != WORKS:
        assert done.code == 2, done.out
        assert answer in done.err
        assert done.err.count("\n") <= 3
        assert not Path("run").exists()
        return
    assert done.code == 0, done.err
    results = json.loads(Path("run/results.json").read_text())
    assert results["steps"] > 0
    assert results["test/loss"] > 0


VIT = (
    "task=vit", "model.depth=1", "model.dim=16", "model.num_heads=2", "data.num_workers=0",
    "trainer=cpu", "callbacks.curves=null", "callbacks.steps.cost=false", "callbacks.classes=null",
    "logger.tensorboard=null", "data.batch_size=32", "trainer.max_epochs=2",
)  # fmt: skip
CAPTIONING = (
    "task=captioning", "trainer=cpu", "encoder.dim=16", "encoder.stages=[[8],[8],[16]]",
    "decoder.dim=16", "decoder.num_heads=2", "data.num_train=24", "data.num_val=6",
    "data.num_test=6", "data.image_size=24", "data.batch_size=5", "callbacks.curves=null",
    "callbacks.steps.cost=false", "logger.tensorboard=null", "trainer.max_epochs=2",
)  # fmt: skip


@pytest.mark.parametrize(
    "task",
    [VIT, CAPTIONING],
)
def test_overfitting(attnkit, task):
    """Of every task, whatever its batches are made of."""
    done = attnkit(*task, "trainer.overfit_batches=1", "run_dir=run")
    assert done.code == 0, done.err
    results = json.loads(Path("run/results.json").read_text())
    assert (results["epochs"], results["steps"]) == (2, 2)


def test_overfitting_is_a_limit_itself(refused):
    refused(
        "trainer.overfit_batches: not together with limit_batches",
        *VIT,
        "trainer.overfit_batches=1",
        "trainer.limit_batches=3",
        "run_dir=run",
    )


def test_a_run_that_max_time_ended_can_go_on(mine, attnkit, hers):
    """It is finished until max_time changes; then it ends as if there had been none."""
    weights = []
    assert mine("run_dir=whole").code == 0
    assert mine("run_dir=run", "trainer.max_time={microseconds: 1}").code == 0
    state = json.loads(Path("run/state.json").read_text())
    assert (state["ended_by"], state["steps"]) == ("max_time", 1)
    done = attnkit("--config-dir", hers, "resume=run")
    assert done.code == 0
    assert "trainer.max_time ended it; to train longer: trainer.max_time=null" in done.out
    done = attnkit("--config-dir", hers, "resume=run", "trainer.max_time=null")
    assert done.code == 0, done.err
    for folder in ("whole", "run"):
        state = json.loads(Path(folder, "state.json").read_text())
        assert (state["ended_by"], state["epochs"], state["steps"]) == ("max_epochs", 2, 10)
        checkpoint = torch.load(Path(folder, "checkpoints/last.ckpt"), weights_only=True)
        weights.append(checkpoint["state_dict"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_one_that_max_steps_ended_in_its_last_epoch_can_go_on(attnkit):
    """Lightning counts that epoch as done."""
    job = (*VIT, "trainer.max_epochs=1", "data.batch_size=300", "run_dir=run")
    assert attnkit(*job, "trainer.max_steps=2").code == 0
    for said in (False, True):
        done = attnkit("resume=run", "trainer.max_steps=-1")
        assert done.code == 0, done.err
        assert ("finished already" in done.out) is said
        assert folders.load_state(Path("run"))["steps"] == 5


@pytest.mark.parametrize("limit", ["max_epochs=3", "max_steps=3", "max_time=00:00:01:00"])
def test_minutes_and_another_end_are_refused(mine, limit):
    done = mine("run_dir=run", "trainer.minutes=1", f"trainer.{limit}")
    assert done.code == 2
    name = limit.partition("=")[0]
    assert f"trainer.{name}: not together with trainer.minutes; give one" in done.err
    assert done.err.count("\n") <= 3
    assert not Path("run").exists()


@pytest.mark.slow
def test_a_run_of_minutes_is_over_until_it_gets_more(attnkit):
    job = [word for word in VIT if not word.startswith("trainer.max_epochs")]
    assert attnkit(*job, "trainer.minutes=0.02", "run_dir=run").code == 0
    state = json.loads(Path("run/state.json").read_text())
    assert state["ended_by"] == "minutes"
    done = attnkit("resume=run")
    assert done.code == 0
    assert "trainer.minutes ended it; to train longer: trainer.minutes=null" in done.out
    done = attnkit("resume=run", "trainer.minutes=0.06")
    assert done.code == 0, done.err
    more = json.loads(Path("run/state.json").read_text())
    assert (more["ended_by"], more["epochs"] > state["epochs"]) == ("minutes", True)


def test_max_time_within_the_last_epoch(mine):
    """The epoch that it broke off is not the end of the run, which can go on as above."""
    limits = ("trainer.max_epochs=1", "trainer.max_time={microseconds: 1}")
    assert mine("run_dir=run", *limits).code == 0
    assert json.loads(Path("run/state.json").read_text())["ended_by"] == "max_time"


def test_a_run_with_more_epochs_than_asked_for_is_over(mine, attnkit, hers):
    """It is tested as it is."""
    stopper = ["+callbacks.killer._target_=mine_of_the_tests.StopAt", "+callbacks.killer.batch=12"]
    assert mine("run_dir=run", "trainer.max_epochs=4", *stopper).code == 143
    done = attnkit("--config-dir", hers, "resume=run", "trainer.max_epochs=1")
    assert done.code == 0, done.err
    assert "trainer.max_epochs=1: the run has 2 already; it trains no more" in done.out
    state = json.loads(Path("run/state.json").read_text())
    assert (state["state"], state["ended_by"], state["epochs"]) == ("done", "max_epochs", 2)
    assert "test/loss" in json.loads(Path("run/results.json").read_text())


def test_what_a_run_brings_itself_can_be_left_out():
    def callbacks(*words):
        job = decide(Request.read(Composer(None), ["task=vit", "trainer=cpu", *words]))
        return [type(c) for c in make_trainer(job.runs[0], MODES["train"]).callbacks]

    own = {"safe": SafeCheckpoints, "accumulation": ExactAccumulation, "last": LastCheckpoint}
    usual = callbacks()
    assert usual.index(ExactAccumulation) < usual.index(Meter)  # which reads the gradients
    assert usual.index(BestCheckpoint) < usual.index(LastCheckpoint)  # which saves its state
    for name, kind in own.items():
        assert set(usual) - set(callbacks(f"callbacks.{name}=null")) == {kind}
