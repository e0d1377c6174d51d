import re

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from attnkit.lightning import EpochLines, Progress, StepMetrics
from attnkit.lightning.callbacks import progress
from attnkit.lightning.console import three_digits


@pytest.fixture
def fit(small_net, loader, make_trainer, tmp_path, capsys):
    def run(*callbacks, net=small_net, **arguments):
        best = ModelCheckpoint(tmp_path, monitor="val/accuracy", mode="max")
        trainer = make_trainer(
            callbacks=[*callbacks, best], enable_checkpointing=True, log_every_n_steps=1,
            enable_progress_bar=any(isinstance(c, Progress) for c in callbacks),
            **{"max_epochs": 3, **arguments},
        )  # fmt: skip
        capsys.readouterr()
        trainer.fit(net(), loader, loader)
        return trainer, capsys.readouterr().out.splitlines()

    return run


def test_a_line_for_each_epoch(fit, small_net):
    class Known(small_net):
        def on_validation_epoch_end(self):
            value = [0.25, 0.75, 0.5][self.current_epoch]
            self.log("val/accuracy", value)

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", 1.0)

    trainer, lines = fit(StepMetrics(), EpochLines(), Progress(), net=Known)
    figures = r"loss \S+  val/loss 1.00, accuracy 0.{}  lr 0.003  \S+ m?s  {}"
    for number, (line, value, best) in enumerate(
        zip(lines, ("250", "750", "500"), ("best", "best", "best: 2"), strict=True), 1
    ):
        assert re.fullmatch(f"epoch {number}/3  " + figures.format(value, best), line), line
    assert f"loss {three_digits(float(trainer.callback_metrics['train/loss']))} " in lines[-1]


def test_the_best_is_known_after_a_resume(fit, make_trainer, small_net, loader, tmp_path):
    lines = EpochLines()
    lines.load_state_dict({"best": {"val/accuracy": 2.0, "epoch": 7}})
    assert EpochLines().best == {}
    _, said = fit(lines, max_epochs=1)
    assert said[0].endswith("best: 7")
    assert lines.state_dict()["best"]["epoch"] == 7


def test_without_a_terminal_it_says_how_far_it_is(fit, monkeypatch):
    now = [0.0]

    def clock():  # each look at it takes four seconds
        now[0] += 4
        return now[0]

    monkeypatch.setattr(progress.time, "monotonic", clock)
    _, lines = fit(StepMetrics(), EpochLines(), max_epochs=1)
    training = [line for line in lines if "batch" in line and "validation" not in line]
    assert training
    assert re.fullmatch(r"epoch 1/1, batch \d/5, loss \S+, lr 0.003, .*", training[0])
    assert any(line.startswith("epoch 1/1, validation, batch") for line in lines)


def test_many_short_epochs_do_not_flood(fit):
    _, lines = fit(EpochLines(), max_epochs=progress.MANY + 5, limit_train_batches=1,
                   limit_val_batches=1)  # fmt: skip
    assert 1 <= len(lines) < 40
    assert lines[-1].startswith("epoch 105/105")
