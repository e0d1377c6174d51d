"""A metric to follow that nothing logs: named before training, at the latest when it is missed."""

import pytest

from attnkit.tasks.image_classification import DigitsData

CAPTIONING = (
    "task=captioning", "trainer=cpu", "encoder.dim=16", "encoder.stages=[[8],[8],[16]]",
    "decoder.dim=16", "data.image_size=24", "data.num_train=24", "data.num_val=6",
    "data.num_test=7", "callbacks.curves=null", "logger.tensorboard=null",
)  # fmt: skip
SMALL = (
    "trainer=cpu", "model.dim=24", "model.depth=2", "callbacks.curves=null",
    "callbacks.steps.cost=false", "callbacks.classes=null", "logger.tensorboard=null",
)  # fmt: skip
FILE = "callbacks: BestCheckpoint: nothing logs its monitor "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (*CAPTIONING, "callbacks.checkpoint.monitor=val/bleu"),
            f"{FILE}'val/bleu'; validation logs val/bleu4, val/cider_d, val/loss",
        ),
        (
            (*SMALL, "callbacks.checkpoint.monitor=accuracy"),
            f"{FILE}'accuracy'; validation logs val/accuracy, val/balanced_accuracy",
        ),
    ],
)
def test_tasks_know_what_they_log(refused, words, message):
    done = refused(message, *words, "run_dir=run")
    assert done.err.count("\n") == 1
    assert "epoch" not in done.out


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("callbacks.checkpoint.monitor=val/f1",), "callbacks: BestCheckpoint"),
        (
            ("callbacks=early_stopping", "callbacks.early_stopping.monitor=val/f1"),
            "callbacks: EarlyStopping",
        ),
    ],
)
def test_a_class_of_ones_own(mine, refused, words, name):
    done = refused(
        f"{name}: nothing logs its monitor 'val/f1'; logged are",
        *words,
        "run_dir=run",
        "callbacks.curves=null",
        by=mine,
        begun=True,
    )
    assert "train/loss" in done.err
    assert "val/loss" in done.err
    assert done.err.count("\n") == 1


def test_a_sanity_check_finds_it_before_training(mine, refused):
    early = ("callbacks.checkpoint.monitor=val/f1", "trainer.num_sanity_val_steps=1")
    done = refused(
        f"{FILE}'val/f1'; the sanity check", *early, "run_dir=run", "callbacks.curves=null", by=mine
    )
    assert "logged val/loss\n" in done.err
    assert "epoch" not in done.out
    right = ("callbacks.checkpoint.monitor=train/loss", "trainer.num_sanity_val_steps=1")
    done = mine(*right, "run_dir=right", "trainer.max_epochs=1", "callbacks.curves=null")
    assert done.code == 0, done.err


def test_a_schedule(mine, refused, hers):
    (hers / "mine_plateau.py").write_text(
        "import torch\nfrom mine_of_the_tests import Mine\n\n\nclass Plateau(Mine):\n"
        "    def configure_optimizers(self):\n"
        "        optimizer = super().configure_optimizers()\n"
        "        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"
        "        schedule = {'scheduler': schedule, 'monitor': 'val/f1'}\n"
        "        return {'optimizer': optimizer, 'lr_scheduler': schedule}\n"
    )
    done = refused(
        "scheduler: nothing logs its monitor 'val/f1'; logged are",
        "module._target_=mine_plateau.Plateau",
        "run_dir=run",
        "callbacks.curves=null",
        by=mine,
        begun=True,
    )
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("mode", ["train", "bench"])
def test_an_error_of_the_data_stays_what_it_is(attnkit, monkeypatch, mode):
    """Also where there is no trainer yet."""

    def breaks(self, stage):
        raise RuntimeError("the file is damaged")

    monkeypatch.setattr(DigitsData, "setup", breaks)
    done = attnkit("task=vit", *SMALL[:-2], f"run={mode}", "run_dir=run")
    assert done.code == 1
    assert "the file is damaged" in done.err
