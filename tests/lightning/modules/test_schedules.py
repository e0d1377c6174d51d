"""Schedules: their formulas, against torch's own, and a plateau that resumes exactly."""

import math
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import MultiStepLR, PolynomialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from attnkit.lightning import (
    ExactResume,
    TaskModule,
    warmup_cosine,
    warmup_polynomial,
    warmup_step,
)


def rates(make, lrs=(1.0,), total_steps=70):
    """The learning rates of all steps, by the schedule that `make` returns of an optimizer."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    scheduler = make(optimizer)
    seen = []
    for _ in range(total_steps + 1):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return torch.tensor(seen, dtype=torch.float64).squeeze(1)


def ours(make, **options):
    return partial(make, **{"total_steps": 70, **options})


def test_warmup_then_half_a_cosine():
    seen = rates(ours(warmup_cosine, warmup_fraction=0.1, min_lr_fraction=0.2))
    torch.testing.assert_close(seen[:7], torch.arange(1, 8, dtype=torch.float64) / 8)
    for step in range(7, 71):
        cosine = (1 + math.cos(math.pi * (step - 7) / 63)) / 2
        assert seen[step].item() == pytest.approx(0.2 + 0.8 * cosine)
    groups = rates(ours(warmup_cosine), lrs=(0.5, 0.1))
    torch.testing.assert_close(groups[:, 0], 5 * groups[:, 1])


@pytest.mark.parametrize("total_steps", [1, 2, 3])
def test_short_runs(total_steps):
    make = ours(warmup_cosine, warmup_fraction=0.5, total_steps=total_steps)
    seen = rates(make, total_steps=total_steps)
    assert (seen[:total_steps] > 0.1).any()
    assert seen[total_steps].item() == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("make", "theirs"),
    [
        (ours(warmup_polynomial, power=2.0, warmup_fraction=0.0), lambda o: PolynomialLR(o, 70, 2)),
        (
            ours(warmup_step, steps_per_epoch=7, every_epochs=3, gamma=0.5),
            lambda o: StepLR(o, 21, 0.5),
        ),
        (
            ours(warmup_step, steps_per_epoch=7, at_epochs=[2, 5]),
            lambda o: MultiStepLR(o, [14, 35], 0.1),
        ),
    ],
)
def test_without_a_warmup_they_are_torchs(make, theirs):
    torch.testing.assert_close(rates(make), rates(theirs))


@pytest.mark.parametrize("make", [warmup_cosine, warmup_polynomial, warmup_step])
@pytest.mark.parametrize(
    "warmup", [{"warmup_steps": 14}, {"warmup_epochs": 2}, {"warmup_fraction": 0.2}]
)
def test_a_warmup_in_steps_epochs_or_as_a_share(make, warmup):
    seen = rates(ours(make, steps_per_epoch=7, **warmup))
    torch.testing.assert_close(seen[:14], torch.arange(1, 15, dtype=torch.float64) / 15)
    assert seen[14] == 1.0


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (warmup_cosine, {"total_steps": 0}, "total_steps: expected at least 1, got 0"),
        (warmup_cosine, {"warmup_fraction": 1.0}, "warmup_fraction: expected"),
        (warmup_cosine, {"min_lr_fraction": 1.5}, "min_lr_fraction: expected"),
        (warmup_cosine, {"warmup_steps": 3, "warmup_epochs": 1}, "warmup_steps: replaces warmup_e"),
        (warmup_cosine, {"warmup_epochs": 1, "steps_per_epoch": None}, "warmup_epochs: needs"),
        (warmup_cosine, {"warmup_steps": -1}, "warmup_steps: expected at least 0"),
        (warmup_polynomial, {"power": -1}, "power"),
        (warmup_step, {"at_epochs": [3], "every_epochs": 2}, "at_epochs: replaces every_epochs"),
        (warmup_step, {"every_epochs": 0}, "every_epochs: expected a number above 0"),
    ],
)
def test_refuses(make, options, message):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match=message):
        make(optimizer, **{"total_steps": 7, "steps_per_epoch": 7, **options})


class Task(TaskModule):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))


@pytest.fixture
def loaders():
    torch.manual_seed(0)
    sets = [TensorDataset(torch.randn(33, 7), torch.randint(5, (33,))) for _ in range(2)]
    return [DataLoader(each, batch_size=3) for each in sets]


NET = {"_target_": "torch.nn.Linear", "in_features": 7, "out_features": 5}


def test_epochs_are_those_of_the_run(make_trainer, loaders):
    scheduler = {"_target_": "attnkit.lightning.warmup_step", "at_epochs": [1], "gamma": 0.5}
    module = Task(NET, scheduler=scheduler)
    trainer = make_trainer(accumulate_grad_batches=2)
    trainer.fit(module, *loaders)
    assert trainer.global_step == 12
    factor = module.lr_schedulers().lr_lambdas[0]
    assert [factor(step) for step in (5, 6)] == [1.0, 0.5]


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_plateau_goes_on_exactly(make_trainer, loaders, tmp_path, stop):
    plateau = {"_target_": "attnkit.lightning.Plateau", "patience": 0, "factor": 0.5}

    def fit(epochs, folder, resume=None):
        torch.manual_seed(0)
        last = ModelCheckpoint(folder, filename="last", enable_version_counter=False)
        trainer = make_trainer(
            max_epochs=epochs, callbacks=[ExactResume(), last], enable_checkpointing=True
        )
        module = Task(NET, {"_target_": "torch.optim.SGD", "lr": 2.0}, plateau)
        trainer.fit(module, *loaders, ckpt_path=resume, weights_only=True)
        return module, trainer.optimizers[0].param_groups[0]["lr"]

    whole, lr = fit(5, tmp_path / "whole")
    fit(stop, tmp_path / "part")
    again, same = fit(5, tmp_path / "part", tmp_path / "part" / "last.ckpt")
    assert lr == same < 1.0
    assert torch.equal(whole.model.weight, again.model.weight)
