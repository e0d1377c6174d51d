"""The tables at the end of a run."""

from io import StringIO

from rich.console import Console

from attnkit.launch.console import tables

RESULTS = {
    "test/accuracy": 0.951, "test/top5_accuracy": 1.0, "val/accuracy_best": 0.94,
    "val/accuracy_last": 0.93, "val/accuracy": 0.93, "train/loss": 0.7425, "best_epoch": 12.0,
    "train/samples_per_second": 85_000.0, "step_seconds": 0.0491, "parameters": 9768.0,
    "kernels/layers.0/edges": 3.0,
}  # fmt: skip


def lines(results):
    console = Console(file=StringIO(), width=80)
    for table in tables("graph · train", results):
        console.print(table)
    text = console.file.getvalue()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()], text


def test_a_row_for_each_metric_and_a_column_for_each_stage():
    cells, text = lines({**RESULTS, "num_seeds": 1})
    assert ["accuracy", "0.9510", "0.9400", "0.9300"] in cells
    assert ["top5_accuracy", "1.0000", "", ""] in cells
    assert ["train/loss", "0.7425"] in cells
    assert ["train/samples_per_second", "85 k/s"] in cells
    assert ["step_seconds", "49.1 ms"] in cells
    assert ["parameters", "9,768"] in cells
    assert ["attention kernels", "edges"] in cells
    assert "of the best epoch" in text


def test_several_seeds_have_a_spread():
    spread = {"test/accuracy_std": 0.0123, "num_seeds": 5}
    cells, text = lines({**RESULTS, **spread})
    assert ["accuracy", "0.9510 ± 0.0123", "0.9400", "0.9300"] in cells
    assert ["num_seeds", "5"] in cells
    assert max(map(len, text.splitlines())) <= 80


def test_no_metrics_no_table_of_them():
    cells, text = lines({"step/seconds": 0.05, "num_seeds": 1})
    assert [row for row in cells if row] == [["step/seconds", "50.0 ms"]]
    assert text.startswith("graph · train")
