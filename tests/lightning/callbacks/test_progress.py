"""The bar on a terminal, as a terminal of 80 columns is sent it."""

import io
import re

import pytest
import rich
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console

from attnkit.lightning import EpochLines, Progress, StepMetrics
from attnkit.lightning.callbacks import progress


@pytest.fixture
def terminal(monkeypatch):
    """Arguments of a console, whose file is a terminal of 80 columns."""
    monkeypatch.setattr(rich, "_console", Console())  # Lightning makes it anew in its place
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    return {"file": io.StringIO(), "force_terminal": True, "width": 80}


def test_one_line_of_80_columns_that_goes(small_net, loader, make_trainer, terminal, tmp_path):
    class Shown(small_net):
        def on_validation_epoch_end(self):
            self.log("val/a_metric_with_a_long_name", 0.123456, prog_bar=True)

    callbacks = [
        StepMetrics(),
        EpochLines(),
        Progress(console_kwargs=terminal),
        ModelCheckpoint(tmp_path),
    ]
    trainer = make_trainer(
        callbacks=callbacks, log_every_n_steps=1, enable_progress_bar=True, max_epochs=2,
        enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(Shown(), loader, loader)
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
