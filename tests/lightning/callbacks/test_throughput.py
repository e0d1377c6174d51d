import math
import time

import pytest
import torch
from torch_geometric.data import Data

from attnkit.lightning import Throughput
from attnkit.lightning.callbacks.meter import num_samples


@pytest.fixture
def clocked(small_net, monkeypatch):
    """A module on whose clock a training step takes 2 s, a validation step 100 s, the rest 0."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Clocked(small_net):
        def training_step(self, batch, batch_idx):
            now[0] += 2.0 if self.global_step else 50.0
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            now[0] += 100.0
            super().validation_step(batch, batch_idx)

    return Clocked()


@pytest.mark.parametrize("val_check_interval", [1.0, 2])
def test_counts_training_and_nothing_else(clocked, loader, make_trainer, val_check_interval):
    trainer = make_trainer(callbacks=[Throughput()], val_check_interval=val_check_interval)
    trainer.fit(clocked, loader, loader)
    assert trainer.callback_metrics["train/samples_per_second"] == 11 / 2


def test_the_first_batches_are_not_counted(clocked, loader, make_trainer):
    trainer = make_trainer(callbacks=[Throughput(skip_batches=0)], max_epochs=1)
    trainer.fit(clocked, loader)
    assert trainer.callback_metrics["train/samples_per_second"] == pytest.approx(55 / 58)

    for skip_batches in (5, 7):
        trainer = make_trainer(callbacks=[Throughput(skip_batches=skip_batches)], max_epochs=1)
        trainer.fit(clocked, loader)
        assert math.isnan(trainer.callback_metrics["train/samples_per_second"])


def test_num_samples():
    assert num_samples({"scale": torch.tensor(2.0), "images": [torch.zeros(7, 3)]}) == 7
    assert num_samples([Data(x=torch.zeros(11, 3), edge_index=torch.zeros(2, 5).long())]) == 11
    with pytest.raises(ValueError, match="found no tensor with a batch dimension in a dict"):
        num_samples({"scale": torch.tensor(2.0)})


def test_samples_counted_by_the_user(clocked, loader, make_trainer):
    trainer = make_trainer(callbacks=[Throughput(num_samples=lambda batch: 2 * len(batch[0]))])
    trainer.fit(clocked, loader)
    assert trainer.callback_metrics["train/samples_per_second"] == 11


def test_refuses():
    with pytest.raises(ValueError, match="skip_batches: expected at least 0, got -1"):
        Throughput(skip_batches=-1)
