import csv
import math

import pytest
import torch
from lightning import Callback

from attnkit.lightning import MetricsCSV, StepMetrics


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


def rows_of(path):
    with path.open(newline="") as file:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


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
    rows = rows_of(tmp_path / "steps.csv")
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
    assert [row["epoch"] for row in rows_of(tmp_path / "metrics.csv")] == [1]


def test_they_are_no_metrics(small_net, loader, make_trainer):
    steps = StepMetrics()
    trainer = make_trainer(callbacks=[steps], log_every_n_steps=1)
    trainer.fit(small_net(), loader, loader)
    assert steps.figures.keys() == {"loss", "lr", "grad_norm", "samples_per_second"}
    assert all(math.isfinite(value) for value in steps.figures.values())
    assert not [name for name in trainer.callback_metrics if name.startswith("step")]


def test_an_epoch_is_a_row_and_a_resumed_run_goes_on(small_net, loader, make_trainer, tmp_path):
    def fit(epochs, **arguments):
        trainer = make_trainer(
            callbacks=[StepMetrics()], logger=MetricsCSV(tmp_path / "run"), max_epochs=epochs,
            log_every_n_steps=2,
        )  # fmt: skip
        module = small_net()
        trainer.fit(module, loader, loader, **arguments)
        return trainer, module

    trainer, module = fit(2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    fit(3)  # in the same folder; what comes after the checkpoint is dropped
    trainer, module = fit(4, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    trainer.test(module, loader, verbose=False)
    rows = rows_of(tmp_path / "run" / "metrics.csv")
    assert [row.get("epoch") for row in rows] == [1, 2, 3, 4, None]
    assert [row["step"] for row in rows] == [5, 10, 15, 20, 20]
    assert all({"train/loss", "val/loss"} <= row.keys() for row in rows[:4])
    assert {"test/loss", "test/accuracy", "step"} == rows[4].keys()
    steps = [row["step"] for row in rows_of(tmp_path / "run" / "steps.csv")]
    assert steps == list(range(2, 21, 2))


def test_a_validation_within_an_epoch_has_its_row(small_net, digits, make_trainer, tmp_path):
    loader = torch.utils.data.DataLoader(digits, batch_size=14)  # four batches
    make_trainer(logger=MetricsCSV(tmp_path), val_check_interval=2, max_epochs=2).fit(
        small_net(), loader, loader
    )
    rows = rows_of(tmp_path / "metrics.csv")
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 2), (1, 4), (2, 6), (2, 8)]
    assert ["train/loss" in row for row in rows] == [False, True, False, True]
