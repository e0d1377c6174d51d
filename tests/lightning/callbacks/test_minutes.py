"""A training of so many minutes, on a clock that goes on with its steps alone."""

import pytest
import torch
from lightning import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from attnkit.lightning import ExactResume, TaskModule
from attnkit.lightning.callbacks import minutes as module_of_minutes
from attnkit.lightning.callbacks.minutes import TOLERANCE, Minutes

VALIDATION = 0.2  # seconds of a batch


class Clock:
    now = 1000.0


class Timed(TaskModule):
    """A step takes a second of the clock; from `slow_from` on, two."""

    clock: Clock
    slow_from: int

    def training_step(self, batch, batch_idx):
        self.clock.now += 2 if self.global_step >= self.slow_from else 1
        images, labels = batch
        return F.cross_entropy(self.model(images * (torch.rand(()) > 0.5)), labels)

    def validation_step(self, batch, batch_idx):
        self.clock.now += VALIDATION
        self.log("val/loss", F.cross_entropy(self.model(batch[0]), batch[1]))


class Watch(Callback):
    """Learning rates, and the steps after which there was validation; stops where it is told to."""

    def __init__(self, stop_at=None, path=None):
        self.rates, self.validated, self.stop_at, self.path = [], [], stop_at, path

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_end(self, trainer, module):
        self.validated.append(trainer.global_step)

    def on_train_batch_end(self, trainer, module, *args):
        if trainer.global_step == self.stop_at:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@pytest.fixture
def fit(digits, make_trainer, monkeypatch):
    """Train for so many minutes of the clock; what there is to know then."""

    def fit(
        minutes, batches=20, *, watch=None, kind=Timed, ckpt_path=None, slow_from=10**9,
        train=None, counted=None,
    ):  # fmt: skip
        clock = Clock()
        monkeypatch.setattr(module_of_minutes, "monotonic", lambda: clock.now)
        torch.manual_seed(0)
        module = kind(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        module.clock, module.slow_from = clock, slow_from
        images, labels = digits[torch.arange(3 * batches) % len(digits)]
        if train is None:
            train = DataLoader(TensorDataset(images, labels), 3, shuffle=True)
        watch, counted = watch or Watch(), counted or Minutes(minutes)
        options = {"max_epochs": 7, "num_sanity_val_steps": 0}
        trainer = make_trainer(callbacks=[counted, watch, ExactResume()], **options)
        options = {"ckpt_path": ckpt_path, "weights_only": True} if ckpt_path else {}
        trainer.fit(module, train, DataLoader(digits, 11), **options)
        return trainer, module, watch, counted, clock.now - 1000

    return fit


@pytest.mark.parametrize(
    ("minutes", "batches", "epochs"),
    [
        (10, 20, 29),  # 600 s / (20 s + 5 batches of validation of 0.2 s, taken for 1/3 s)
        (1, 20, 3),  # 60 s are 2.8 epochs: three shorter ones
        (1, 200, 1),  # a part of the first epoch
        (2, 3, 30),  # the first epochs are shorter than what is measured
    ],
)
def test_it_ends_in_time_and_the_schedule_with_it(fit, minutes, batches, epochs):
    trainer, _, watch, counted, seconds = fit(minutes, batches)
    assert trainer.current_epoch == counted.epochs == trainer.max_epochs
    assert abs(counted.epochs - epochs) <= 1
    one = trainer.num_training_batches + 5 * VALIDATION
    assert abs(seconds - 60 * minutes) <= max(TOLERANCE * 60 * minutes, one / 2) + 2
    assert watch.validated[-1] == trainer.global_step == len(watch.rates)
    assert len(watch.validated) == counted.epochs
    total = trainer.estimated_stepping_batches
    assert total == trainer.global_step
    # the last step is made with the end of the cosine, 0.01 of the highest rate
    assert watch.rates[-1] < 0.05 * 1e-3
    assert max(watch.rates) > 0.9e-3


def test_epochs_are_counted_again_where_steps_get_slower(fit):
    steady, *_ = fit(5)
    trainer, _, watch, _, seconds = fit(5, slow_from=100)
    assert trainer.current_epoch < steady.current_epoch - 2
    assert abs(seconds - 300) <= TOLERANCE * 300 + 21
    assert watch.rates[-1] < 0.05 * 1e-3


@pytest.mark.parametrize(("minutes", "stop_at"), [(5, 90), (1, 5), (1, 30)])
def test_a_resumed_run_ends_as_one_that_was_never_stopped(fit, tmp_path, minutes, stop_at):
    whole, module, watch, counted, seconds = fit(minutes)
    path = tmp_path / "stopped.ckpt"
    *_, stopped, before, half = fit(minutes, watch=Watch(stop_at, path))
    assert half < seconds / 2 + 10
    resumed, again, rest, after, more = fit(minutes, ckpt_path=path)
    if before.epochs is None:  # measured anew, from where it stood
        assert abs(half + more - seconds) <= 21
        return
    assert (after.epochs, resumed.global_step) == (counted.epochs, whole.global_step)
    assert after.used == pytest.approx(counted.used)
    assert stopped.rates + rest.rates == watch.rates
    assert torch.equal(again.model[1].weight, module.model[1].weight)


def test_more_minutes_for_a_run_that_goes_on(fit, tmp_path):
    path = tmp_path / "stopped.ckpt"
    fit(5, watch=Watch(130, path))
    trainer, _, _, counted, seconds = fit(10, ckpt_path=path)
    assert counted.used == pytest.approx(600, rel=TOLERANCE)
    assert seconds < 500
    assert trainer.current_epoch == counted.epochs


class Stream(IterableDataset):
    """Digits, nobody knows how many."""

    def __init__(self, digits, count):
        self.digits, self.count = digits, count

    def __iter__(self):
        return (self.digits[n % len(self.digits)] for n in range(self.count))


class Own(Timed):
    """Its schedule is its own."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1000)]


@pytest.mark.parametrize(
    ("count", "epochs", "steps"),
    [(60, 29, 580), (3000, 1, 600)],  # the second would take 1000 s
)
def test_data_without_a_length(fit, digits, count, epochs, steps):
    """Whole epochs, or the first until the time is over."""
    with pytest.warns(UserWarning, match="Own makes its learning-rate schedule itself"):
        trainer, _, watch, _, seconds = fit(10, train=DataLoader(Stream(digits, count), 3),
                                            kind=Own)  # fmt: skip
    assert abs(trainer.current_epoch - epochs) <= 1
    assert abs(trainer.global_step - steps) <= 21
    assert abs(seconds - 600) <= TOLERANCE * 600
    assert watch.validated[-1] == trainer.global_step


def test_a_second_fit_counts_anew(fit):
    counted = Minutes(10)
    (one, *_, first), (two, *_, second) = (
        fit(10, batches, counted=counted) for batches in (40, 80)
    )
    assert first == pytest.approx(second, rel=2 * TOLERANCE)
    assert two.current_epoch < one.current_epoch - 5


@pytest.mark.parametrize("minutes", [0, -1, float("inf")])
def test_wrong(minutes):
    with pytest.raises(ValueError, match="minutes: expected a positive number"):
        Minutes(minutes)
