"""What a run shows: a line for each epoch, and the bar as a terminal of 80 columns is sent it."""

import io
import re

import pytest
import rich
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console

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


@pytest.fixture
def terminal(monkeypatch):
    """Arguments of a console, whose file is a terminal of 80 columns."""
    monkeypatch.setattr(rich, "_console", Console())  # Lightning makes it anew in its place
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    return {"file": io.StringIO(), "force_terminal": True, "width": 80}


def test_one_line_of_80_columns_that_goes(fit, small_net, loader, terminal):
    class Shown(small_net):
        def on_validation_epoch_end(self):
            self.log("val/a_metric_with_a_long_name", 0.123456, prog_bar=True)

    bar = Progress(console_kwargs=terminal)
    trainer, _ = fit(StepMetrics(), EpochLines(), bar, net=Shown, max_epochs=2)
    trainer.test(Shown(), loader, verbose=False)
    written = re.sub(r"\x1b\[[0-9;?]*[mhl]", "", terminal["file"].getvalue())
    drawn = re.split(r"\r?\x1b\[2K|\x1b\[1A|\r?\n|\r", written)
    bars = [text for text in drawn if text.startswith("Epoch ")]
    assert {bar.split()[1] for bar in bars} == {"1/2", "2/2"}
    assert any(re.search(r"loss: \S+ lr: 0.003 grad: \S+ per s: \d+", bar) for bar in bars)
    assert max(len(text) for text in drawn if not text.startswith("epoch")) <= 80
    # the lines of the epochs stand by themselves, and after the bars there is nothing
    lines = [text for text in drawn if re.match(r"epoch \d/2  loss", text)]
    assert len(lines) == 2
    assert not any("epoch" in bar for bar in bars)
    assert written.rstrip().endswith("\x1b[1A\x1b[2K")


def test_there_is_none_without_a_terminal(small_net, loader, make_trainer, capsys):
    trainer = make_trainer(callbacks=[Progress()], enable_progress_bar=True)
    trainer.fit(small_net(), loader, loader)
    trainer.test(small_net(), loader, verbose=False)
    assert capsys.readouterr().out.strip() == ""
