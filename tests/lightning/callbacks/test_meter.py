"""One meter of steps, epochs and the whole training; each by itself is in the tests beside."""

import time

import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from attnkit.lightning import Meter

RATE = "train/samples_per_second"


@pytest.fixture
def slow(small_net, monkeypatch):
    """A module and a logger. On their clock the first step takes 50 s, another 2, a validation
    batch 100, and to log 7."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Net(small_net):
        def training_step(self, batch, batch_idx):
            now[0] += 2.0 if self.global_step else 50.0
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            now[0] += 100.0
            super().validation_step(batch, batch_idx)

    class Logger(DummyLogger):
        def log_metrics(self, metrics, step):
            now[0] += 7.0 if "step/loss" in metrics else 0.0

    return Net(), Logger()


def test_each_figure_has_its_own_time(slow, loader, make_trainer):
    """That of steps none of logging; that of epochs all but validation; that of a step no first."""
    meter, (net, logger) = Meter(), slow
    options = {"log_every_n_steps": 1, "val_check_interval": 2, "logger": logger}
    trainer = make_trainer(callbacks=[meter], **options)
    trainer.fit(net, loader, loader)
    assert meter.figures["samples_per_second"] == 11 / 2
    assert trainer.callback_metrics[RATE] == pytest.approx(11 / (2 + 7))
    assert meter.state_dict()["seconds"] == [2.0 + 7] * 4


@pytest.mark.parametrize("part", ["steps", "throughput", "cost"])
def test_each_part_can_be_left_out(small_net, loader, make_trainer, part):
    meter = Meter(**{part: False})
    trainer = make_trainer(callbacks=[meter], log_every_n_steps=1, max_epochs=1)
    trainer.fit(small_net(), loader)
    found = {"steps": meter.figures, "cost": meter.results}
    found["throughput"] = RATE in trainer.callback_metrics
    assert [name for name, there in found.items() if not there] == [part]
