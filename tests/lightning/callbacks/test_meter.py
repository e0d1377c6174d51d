"""A meter of steps, epochs and the whole training, and each of the three by itself."""

import csv
import math
import time

import pytest
import torch
from lightning import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from torch_geometric.data import Data

from attnkit.lightning import Cost, Meter, MetricsCSV, StepMetrics, Throughput
from attnkit.lightning.callbacks.meter import num_samples

RATE = "train/samples_per_second"


@pytest.fixture
def clocked(small_net, monkeypatch):
    """A module and a logger. On their clock the first step takes 50 s, another 2, a batch of
    validation 100, and to log 7."""
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


def test_each_figure_has_its_own_time(clocked, loader, make_trainer):
    """That of steps none of logging; that of epochs all but validation; that of a step no first."""
    meter, (net, logger) = Meter(), clocked
    options = {"log_every_n_steps": 1, "val_check_interval": 2, "logger": logger}
    trainer = make_trainer(callbacks=[meter], **options)
    trainer.fit(net, loader, loader)
    assert meter.figures.keys() == {"loss", "lr", "grad_norm", "samples_per_second"}
    assert all(math.isfinite(value) for value in meter.figures.values())
    assert meter.figures["samples_per_second"] == 11 / 2
    assert trainer.callback_metrics[RATE] == pytest.approx(11 / (2 + 7))
    assert meter.state_dict()["seconds"] == [2.0 + 7] * 4
    assert not [name for name in trainer.callback_metrics if name.startswith("step")]


@pytest.mark.parametrize("part", ["steps", "throughput", "cost"])
def test_each_part_can_be_left_out(small_net, loader, make_trainer, part):
    meter = Meter(**{part: False})
    trainer = make_trainer(callbacks=[meter], log_every_n_steps=1, max_epochs=1)
    trainer.fit(small_net(), loader)
    found = {"steps": meter.figures, "cost": meter.results}
    found["throughput"] = RATE in trainer.callback_metrics
    assert [name for name, there in found.items() if not there] == [part]


# --- throughput and cost --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "rate"),
    [
        ({}, {}, 11 / 2),
        ({}, {"val_check_interval": 2}, 11 / 2),
        ({"num_samples": lambda batch: 2 * len(batch[0])}, {}, 11),
        ({"skip_batches": 0}, {"max_epochs": 1}, 55 / 58),
        ({"skip_batches": 5}, {"max_epochs": 1}, math.nan),
        ({"skip_batches": 7}, {"max_epochs": 1}, math.nan),
    ],
)
def test_throughput_counts_training_and_nothing_else(
    clocked, loader, make_trainer, arguments, options, rate
):
    trainer = make_trainer(callbacks=[Throughput(**arguments)], **options)
    trainer.fit(clocked[0], loader, loader)
    assert float(trainer.callback_metrics[RATE]) == pytest.approx(rate, nan_ok=True)


def test_num_samples():
    assert num_samples({"scale": torch.tensor(2.0), "images": [torch.zeros(7, 3)]}) == 7
    assert num_samples([Data(x=torch.zeros(11, 3), edge_index=torch.zeros(2, 5).long())]) == 11
    with pytest.raises(ValueError, match="found no tensor with a batch dimension in a dict"):
        num_samples({"scale": torch.tensor(2.0)})
    with pytest.raises(ValueError, match="skip_batches: expected at least 0, got -1"):
        Throughput(skip_batches=-1)


@pytest.mark.parametrize(("val_check_interval", "steps"), [(1.0, 8), (2, 4)])
def test_parameters_and_the_time_of_a_step(
    clocked, loader, make_trainer, val_check_interval, steps
):
    cost, net = Cost(), clocked[0]
    trainer = make_trainer(callbacks=[cost], val_check_interval=val_check_interval)
    trainer.fit(net, loader, loader)
    assert cost.results["parameters"] == sum(p.numel() for p in net.parameters())
    assert cost.state_dict()["seconds"] == [2.0] * steps  # neither validation nor a first batch's
    assert cost.results["step_seconds"] == 2.0
    assert "multiply_adds" not in cost.results  # the module has no example


def test_multiply_adds_of_the_example_change_nothing_of_training(
    small_net, loader, digits, make_trainer
):
    def trained(callbacks):
        torch.manual_seed(0)
        module = small_net()
        module.example_input_array = digits[0][0][None]
        modes = [m.training for m in module.modules()]
        make_trainer(callbacks=callbacks, max_epochs=1).fit(module, loader)
        assert modes == [m.training for m in module.modules()]
        return module.state_dict()

    cost = Cost()
    torch.testing.assert_close(trained([cost]), trained([Callback()]), rtol=0, atol=0)
    patches, attention, head = 16 * 12 * 4, 16 * 12 * (36 + 12) + 3 * 16 * 16 * (4 + 4), 12 * 10
    assert cost.results["multiply_adds"] == patches + attention + head


# --- steps ----------------------------------------------------------------------------------------


class Notes(Callback):
    """The loss, gradient norm and learning rate of every step, found in the plainest way."""

    def __init__(self):
        self.losses, self.norms, self.rates = [], [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        squares = [p.grad.double().square().sum() for p in module.parameters()]
        self.norms.append(torch.stack(squares).sum().sqrt().item())
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item() * trainer.accumulate_grad_batches)


@pytest.fixture
def falling(small_net):
    class Falling(small_net):
        """Its rate falls at every step, and it decays as the epochs go."""

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Falling()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_logged_is_what_happened(falling, loader, make_trainer, tmp_path, accumulate):
    notes, every = Notes(), 2
    make_trainer(
        callbacks=[StepMetrics(), notes], logger=MetricsCSV(tmp_path), log_every_n_steps=every,
        gradient_clip_val=1e-3, accumulate_grad_batches=accumulate, max_epochs=4,
    ).fit(falling, loader, loader)  # fmt: skip
    steps = len(notes.norms)
    assert steps == (20 if accumulate == 1 else 12)
    rows = [
        {name: float(value) for name, value in row.items()}
        for row in csv.DictReader((tmp_path / "steps.csv").open(newline=""))
    ]
    assert [row["step"] for row in rows] == list(range(every, steps + 1, every))
    ends = [*range(0, 20, 1)] if accumulate == 1 else [1, 3, 4, 6, 8, 9, 11, 13, 14, 16, 18, 19]
    began = 0
    for row in rows:
        last = int(row["step"]) - 1
        assert row["grad_norm"] == pytest.approx(notes.norms[last], rel=1e-5)
        assert row["grad_norm"] > 1e-3  # before it is clipped
        assert row["lr"] == notes.rates[last] == 0.5 ** (last + 1)
        losses = notes.losses[began : ends[last] + 1]
        assert row["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        assert row["epoch"] == ends[last] // 5 + 1
        assert row["samples_per_second"] > 0
        began = ends[last] + 1


def test_nothing_is_logged_where_that_is_asked_for(small_net, loader, make_trainer, tmp_path):
    steps = StepMetrics()
    trainer = make_trainer(
        callbacks=[steps], logger=MetricsCSV(tmp_path), log_every_n_steps=0, max_epochs=1
    )
    trainer.fit(small_net(), loader, loader)
    assert steps.figures == {}
    assert not (tmp_path / "steps.csv").exists()
    assert (tmp_path / "metrics.csv").exists()
