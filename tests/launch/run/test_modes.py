"""Every mode uses what is typed, or refuses it; and a mode of one's own is one entry."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from attnkit.launch import trainer as trainers
from attnkit.launch.config import schema
from attnkit.launch.config.compose import Composer
from attnkit.launch.config.files import Origins
from attnkit.launch.config.permission import Consent
from attnkit.launch.decide import Request
from attnkit.launch.modes import MODES, Mode, bench
from attnkit.launch.modes.rules import check_uses
from attnkit.lightning import build as building
from attnkit.lightning.errors import UserError

SMALL = ("model.dim=16", "model.depth=1", "model.num_heads=1", "trainer.limit_batches=2")
# A changed key of each group and of each key at the top, as it is typed, for a Vision Transformer.
CHANGED = {
    "module": "module.label_smoothing=0.25",
    "model": "model.dropout_p=0.25",
    "backbone": "backbone=resnet",
    "attention": "attention=se",
    "encoder": "encoder=cnn",
    "decoder": "decoder=lstm",
    "finetune": "finetune.layer_decay=0.5",
    "data": "data.batch_size=17",
    "predict": "predict.batch_size=19",
    "export": "export.formats=[safetensors]",
    "explain": "explain.batch_size=29",
    "optimizer": "optimizer.lr=0.0625",
    "scheduler": "scheduler.warmup_fraction=0.25",
    "trainer": "trainer.deterministic=true",
    "logger": "logger.tensorboard.name=mine",
    "callbacks": "callbacks.progress.refresh_rate=7",
    "seed": "seed=3",
    "seeds": "seeds=2",
    "splits": "splits=2",
    "run_dir": "run_dir=another",
    "init": "init=trained",
    "distill": "distill.teacher=trained",
    "resume": "resume=trained",
    "sweep": "sweep=latest",
    "ckpt": "ckpt=trained",
    "images": "images=trained/learning_curves.png",
    "compile": "compile=true",
    "precision": "precision=bf16-mixed",
    "rank_logs": "rank_logs=true",
    "record": "record.metric=val/accuracy",
    "reproduce": "reproduce.minutes=1",
}
FREE = {"run", "task", "level", "allow", "vars"}
RUNS = [k for k in MODES.values() if k.is_run or k.name == "check"]


def test_every_key_is_looked_at():
    keys = {field.name for field in dataclasses.fields(schema.Config)}
    assert keys == set(CHANGED) | FREE
    for mode in MODES.values():
        assert mode.uses <= keys, mode.name


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder `trained` in a folder of its own."""
    from attnkit.launch.main import main

    folder = tmp_path_factory.mktemp("modes")
    code = main([*("task=vit", *SMALL, "trainer.max_epochs=1"), f"run_dir={folder / 'trained'}"])
    assert code == 0
    return folder


def command_of(mode: Mode) -> list[str]:
    return [f"run={mode.name}", *([CHANGED["ckpt"]] if mode.needs_ckpt else [])]


@pytest.mark.parametrize("mode", RUNS, ids=lambda mode: mode.name)
def test_what_a_mode_does_not_use_is_refused(refused, trained, monkeypatch, mode):
    """Every key by the check; the first, and resume, by a command, which changes nothing."""
    keys = [key for key in CHANGED if not mode.reads(key)]
    config = OmegaConf.create({"run": mode.name, "ckpt": "trained"})
    said = {key: f"{CHANGED[key]}: has no effect in run={mode.name}" for key in keys}
    for key in keys:
        typed = Request(Composer(), [CHANGED[key]], config, Origins([], list), Consent())
        with pytest.raises(UserError, match=re.escape(said[key])):
            check_uses(typed)
    if "resume" in keys:
        said["resume"] = f"run={mode.name}: not together with resume"
    monkeypatch.chdir(trained)
    task = ["task=vit"] if not mode.needs_ckpt else []
    for key in {keys[0]} | ({"resume"} & {*keys}):
        refused(said[key], *task, *command_of(mode), CHANGED[key])


# What a run of this task and data may have besides, but not together with the rest.
ALONE = {"seeds", "splits", "resume", "backbone", "attention", "encoder", "decoder"}


@pytest.mark.parametrize("mode", RUNS, ids=lambda mode: mode.name)
def test_what_a_mode_uses_reaches_its_objects(attnkit, trained, monkeypatch, mode):
    """All at once; what is built and what the trainer is given is looked at as it passes by."""
    monkeypatch.chdir(trained)
    seen = []
    call, trainer = building._call, trainers.Trainer

    def noting_call(arguments, *rest):
        seen.append({**arguments})
        return call(arguments, *rest)

    def noting_trainer(**arguments):
        seen.append(arguments)
        return trainer(**arguments)

    monkeypatch.setattr(building, "_call", noting_call)
    monkeypatch.setattr(trainers, "Trainer", noting_trainer)
    monkeypatch.setattr(bench, "SECONDS", 0.1)
    from_checkpoint = "ckpt" in mode.uses
    keys = [k for k in CHANGED if k in mode.uses and k not in ALONE | {"compile"}]
    if from_checkpoint:
        keys.remove("model")  # of the checkpoint, whose weights would not care about dropout
    if "images" in keys:
        keys.remove("data")  # the images are the data
    if mode.name == "bench":
        keys.remove("callbacks")  # of which only averages of weights take part
    here = {**CHANGED, "run_dir": f"run_dir={mode.name}"}
    start = [f"run={mode.name}"] if from_checkpoint else ["task=vit", f"run={mode.name}", *SMALL]
    if mode.name in ("train", "check"):
        start.append("trainer.max_epochs=1")
    done = attnkit(*start, *(here[key] for key in keys))
    assert done.code == 0, done.err
    assert ("init: weights of" in done.out) is (mode.name == "train")  # a check is silent
    elsewhere = {"run_dir", "ckpt", "images", "init", "seed", "precision", "rank_logs", "distill"}
    for key in set(keys) - elsewhere:
        name, _, value = CHANGED[key].partition("=")
        name, value = name.rpartition(".")[2], yaml.safe_load(value)
        assert any(arguments.get(name) == value for arguments in seen), key
    if "distill" in keys:
        teachers = [str(arguments.get("teacher")) for arguments in seen]
        assert any("trained" in teacher for teacher in teachers)
    if "precision" in keys:
        assert any(arguments.get("precision") == "bf16-mixed" for arguments in seen)
    assert Path(mode.name).is_dir() is (mode.name != "check")


def test_data_of_a_prediction_of_images_is_refused(refused, trained, monkeypatch):
    monkeypatch.chdir(trained)
    done = refused(
        "data.batch_size=256: has no effect in run=predict, which reads images=",
        "run=predict",
        "ckpt=trained",
        CHANGED["images"],
        "data.batch_size=256",
    )
    assert "predict.batch_size" in done.err


@pytest.mark.parametrize("mode", ["test", "predict", "bench"])
@pytest.mark.parametrize("key", ["max_epochs=9", "val_check_interval=0.5", "oom_retry=false"])
def test_arguments_of_training_are_refused_elsewhere(refused, trained, monkeypatch, mode, key):
    monkeypatch.chdir(trained)
    needs = ["ckpt=trained"] if mode != "bench" else ["task=vit"]
    needs += [CHANGED["images"]] if mode == "predict" else []
    refused(f"trainer.{key}: has no effect in run={mode}", f"run={mode}", *needs, f"trainer.{key}")


EARLY = "+callbacks.early={_target_:lightning.pytorch.callbacks.EarlyStopping,monitor:val/loss}"


@pytest.mark.parametrize(
    ("mode", "callback"),
    [
        ("test", "callbacks.curves.path=x.png"),
        ("test", EARLY),
        ("predict", "callbacks.checkpoint.monitor=val/loss"),
        ("bench", "callbacks=interpret"),
    ],
)  # fmt: skip
def test_callbacks_that_take_no_part_are_refused(refused, trained, monkeypatch, mode, callback):
    monkeypatch.chdir(trained)
    before = sorted(trained.rglob("*"))
    needs = ["ckpt=trained"] if mode != "bench" else ["task=vit", *SMALL]
    needs += [CHANGED["images"]] if mode == "predict" else []
    refused(f"has no effect in run={mode}", f"run={mode}", *needs, callback)
    assert sorted(trained.rglob("*")) == before


def test_another_task_is_refused_in_a_resumed_run(refused, trained, monkeypatch):
    monkeypatch.chdir(trained)
    done = refused("task=captioning: the run in", "resume=trained", "task=captioning")
    assert "is of task vit" in done.err


GREETING = """\
from attnkit.lightning.errors import UserError

def rules(request):
    if request.config["data"].get("samples", 0) > 100:
        raise UserError("data.samples: too many to greet")

def work(run):
    data, module = run.make_data(), run.make_module()
    trainer = run.make_trainer()
    run.ready()
    (run.folder / "greeting.txt").write_text(f"hello {type(module).__name__}")
    return {"greetings": 1}
"""


def test_a_mode_of_ones_own_is_one_entry(mine, monkeypatch, tmp_path):
    (tmp_path / "greeting_of_the_tests.py").write_text(GREETING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "greeting_of_the_tests", raising=False)
    greet = Mode(
        "greet",
        frozenset({"module", "data", "trainer", "run_dir"}),
        "greeting_of_the_tests.work",
        rules="greeting_of_the_tests.rules",
    )
    monkeypatch.setitem(MODES, greet.name, greet)
    done = mine("run=greet", "run_dir=here")
    assert done.code == 0, done.err
    assert Path("here/greeting.txt").read_text() == "hello Mine"
    assert "greetings" in done.out
    assert "seed=1: has no effect in run=greet" in mine("run=greet", "seed=1").err
    assert "too many to greet" in mine("run=greet", "++data.samples=101", "run_dir=two").err
    assert not Path("two").exists()
    assert ", greet" in mine("--help").out
