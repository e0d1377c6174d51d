"""metrics.csv of a run that goes on."""

import csv

from attnkit.lightning import MetricsCSV


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [(row["epoch"], row["step"], row["test/loss"]) for row in csv.DictReader(file)]


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
        assert rows(tmp_path) == [("1", "3", ""), ("2", "6", ""), ("", "6", str(loss))]


def test_rows_of_steps_that_come_again_are_left_out(tmp_path):
    epochs = [({"epoch": n, "train/loss": 2.0}, 3 * n + 2) for n in range(3)]
    log(tmp_path, *epochs, ({"epoch": 3, "test/loss": 1.0}, 9))
    log(tmp_path, epochs[1])
    assert [row[:2] for row in rows(tmp_path)] == [("1", "3"), ("2", "6")]
