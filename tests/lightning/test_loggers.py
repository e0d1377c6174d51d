"""metrics.csv and steps.csv, also of a run that goes on."""

import csv

import torch

from attnkit.lightning import MetricsCSV, StepMetrics


def rows_of(path):
    with path.open(newline="") as file:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


def figures(folder):
    found = rows_of(folder / "metrics.csv")
    return [(row.get("epoch"), row["step"], row.get("test/loss")) for row in found]


def log(folder, *given):
    logger = MetricsCSV(folder)
    for metrics, step in given:
        logger.log_metrics(metrics, step)
    logger.finalize("success")


def test_a_run_that_stopped_before_its_test_keeps_its_last_epoch(tmp_path):
    epochs = [({"epoch": 0, "train/loss": 2.0}, 2), ({"epoch": 1, "train/loss": 1.0}, 5)]
    log(tmp_path, *epochs)
    for loss in (0.5, 0.25):  # the second time in the place of the first
        log(tmp_path, ({"epoch": 2, "test/loss": loss}, 6))
        assert figures(tmp_path) == [(1, 3, None), (2, 6, None), (None, 6, loss)]


def test_rows_of_steps_that_come_again_are_left_out(tmp_path):
    epochs = [({"epoch": n, "train/loss": 2.0}, 3 * n + 2) for n in range(3)]
    log(tmp_path, *epochs, ({"epoch": 3, "test/loss": 1.0}, 9))
    log(tmp_path, epochs[1])
    assert [row[:2] for row in figures(tmp_path)] == [(1, 3), (2, 6)]


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
