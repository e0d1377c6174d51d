"""What `ClassificationModule` logs is what Lightning's own `self.log` says."""

import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from attnkit.lightning import ClassificationModule, Throughput, _private
from attnkit.lightning.callbacks import meter


class Digits(ClassificationModule):
    """It logs numbers of its own in the same hooks, before and after."""

    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self.model(batch[0]), batch[1], reduction="none")
        self.log("train/first", losses.max().detach(), on_step=False, on_epoch=True)
        self.log_train_loss(losses, losses / 2)
        return losses.mean()

    def on_train_epoch_end(self):
        self.log("train/own", torch.tensor(1.0 + self.current_epoch))

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits = self.model(batch[0])
        self.evaluate("val", logits, batch[1])
        self.log("val/last", logits.abs().max())

    def test_step(self, batch, batch_idx):
        self.evaluate("test", self.model(batch[0]), batch[1])


class Found(CSVLogger):
    """What is logged of each validation, epoch and test."""

    def __init__(self, folder):
        super().__init__(folder)
        self.found = []

    def log_metrics(self, metrics, step=None):
        rate = "train/samples_per_second"  # of the clock
        self.found.append({k: v > 0 if k == rate else v for k, v in metrics.items()})


def metrics_of_a_run(digits, make_trainer, monkeypatch, tmp_path, loaders, **options):
    """Of each validation, epoch and the test; and how often Lightning logged which name."""
    torch.manual_seed(0)
    calls = {}

    def log(self, name, *args, **kwargs):
        calls[name] = calls.get(name, 0) + 1
        original(self, name, *args, **kwargs)

    original = LightningModule.log
    monkeypatch.setattr(LightningModule, "log", log)
    net = Digits(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), num_classes=10)
    found = Found(tmp_path)
    options = {**options, "logger": found, "callbacks": [Throughput()]}
    trainer = make_trainer(max_epochs=3, **options)
    train = DataLoader(digits, batch_size=11)
    val = [DataLoader(Subset(digits, range(0, 55, step)), batch_size=7) for step in loaders]
    trainer.fit(net, train, val)
    if len(val) == 1:
        trainer.test(net, train, verbose=False)
    monkeypatch.undo()
    return found.found, calls


@pytest.mark.parametrize(
    ("loaders", "options"),
    [
        ([2], {"num_sanity_val_steps": 2, "log_every_n_steps": 2}),
        ([2], {"val_check_interval": 2}),
        ([2, 3], {}),
    ],
    ids=["sanity", "within an epoch", "two loaders"],
)
def test_logged_again_is_logged(digits, make_trainer, monkeypatch, tmp_path, loaders, options):
    found, calls = metrics_of_a_run(digits, make_trainer, monkeypatch, tmp_path, loaders, **options)
    with monkeypatch.context() as patch:
        patch.setattr(_private, "log_again", lambda *args: False)
        patch.setattr(meter, "log_again", lambda *args: False)
        expected, all_calls = metrics_of_a_run(
            digits, make_trainer, patch, tmp_path, loaders, **options
        )
    assert found == expected
    names = set().union(*found)
    assert {"train/loss", "train/plain_loss", "train/samples_per_second", "train/own"} <= names
    assert len({epoch["train/loss"] for epoch in found if "train/loss" in epoch}) > 2
    assert calls["val/loss"] == len(loaders)
    assert calls["train/loss"] == calls["train/samples_per_second"] == 1
    assert all_calls["train/loss"] == 15
    assert calls["train/first"] == all_calls["train/first"] == 15
