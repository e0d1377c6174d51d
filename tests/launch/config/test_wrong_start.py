"""What only a constructor or the start of a run can see to be wrong: nothing is left of it."""

import os
from pathlib import Path

import pytest

SMALL = (
    "model.dim=24", "model.depth=1", "trainer.accelerator=cpu", "trainer.limit_batches=2",
    "trainer.max_epochs=1", "callbacks.curves=null", "callbacks.classes=null",
    "logger.tensorboard=null",
)  # fmt: skip
# What only a constructor or the start of a run can see, with what it is blamed on.
STARTED = [
    ("trainer.max_epochs=-5", "trainer: "),
    ("trainer.accelerator=gpuu", "trainer: "),
    ("trainer.strategy=dpd", "trainer: "),
    ("trainer.max_time=abc", "trainer: "),
    ("trainer.val_check_interval=100000", "`val_check_interval` (100000) must be less"),
    ("precision=transformer-engine", "trainer: "),
    ("data.val_fraction=2", "val_fraction"),
    ("data.batch_size=0", "batch_size"),
    ("data.image_size=0", "image_size"),
    ("data.augment.rotate_degrees=-500", "rotate_degrees"),
    ("model.num_heads=5", "num_heads"),
    ("model.patch_size=3", "patch_size"),
    ("module.label_smoothing=3", "label_smoothing"),
    ("module.num_classes=3", "num_classes"),
    ("optimizer.lr=-1", "optimizer: AdamW: Invalid learning rate: -1"),
    ("optimizer={_target_: torch.nn.Linear}", "optimizer"),
    ("optimizer={_target_: attnkit.lightning.muon, ns_steps: 0}", "ns_steps: expected at least 1"),
    ("callbacks=looks", "WordLooks: expected an ImageCaptioning"),
    ("scheduler.warmup_fraction=2", "warmup_fraction"),
    ("scheduler={_target_: torch.optim.lr_scheduler.StepLR}", "scheduler"),
    ("callbacks.checkpoint.mode=up", "callbacks.checkpoint.mode: expected "),
    ("callbacks.x={_target_: torch.nn.ReLU}", "callbacks.x: torch.nn.ReLU is not a Callback"),
    ("logger.x={_target_: lightning.pytorch.loggers.CometLogger}", "logger.x: "),
]


@pytest.mark.parametrize(("command", "message"), STARTED)
def test_wrong_start(attnkit, command, message):
    _check(attnkit(*SMALL, command), message)


@pytest.mark.parametrize(
    ("command", "message"),
    [("data.batch_size=0", "batch_size"), ("trainer.val_check_interval=100000", "`val_check_")],
    ids=["built", "started"],
)
def test_wrong_start_in_a_folder_to_be_made(attnkit, command, message):
    _check(attnkit(*SMALL, command, "run_dir=made/here"), message)


def _check(done, message):
    assert done.code == 2, done
    assert message in done.err
    assert len(done.err.strip().splitlines()) <= 3
    assert os.listdir(".") == []


def test_what_was_there_stays(attnkit, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in ("outputs/vit/other", "outputs/other"):
        (tmp_path / "here" / folder).mkdir(parents=True)
    small = ("model.dim=24", "model.depth=1", "optimizer.lr=-1", "trainer.accelerator=cpu")
    assert attnkit(*small).code == 2
    assert attnkit(*small, f"run_dir={tmp_path / 'empty'}").code == 2
    assert sorted(os.listdir("outputs")) == ["other", "vit"]
    assert os.listdir("outputs/vit") == ["other"]
    assert os.listdir(tmp_path / "empty") == []


def test_refused_seeds_leave_nothing_and_a_refused_trial_its_error(attnkit):
    small = ("model.dim=24", "model.depth=1", "trainer.accelerator=cpu", "run_dir=all")
    assert attnkit(*small, "seeds=2", "optimizer.lr=-1").code == 2
    assert os.listdir(".") == []
    assert attnkit("-m", *small, "optimizer.lr=-1,-2").code == 1
    trials = [path for path in Path("all").iterdir() if path.is_dir()]
    assert [os.listdir(trial) for trial in trials] == [["error.txt"], ["error.txt"]]
