"""Numbers, headers and names in the table and the picture of a sweep, of values like Optuna's."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from attnkit.launch.sweep import ranking, report
from attnkit.launch.sweep.record import Trial, shortened
from attnkit.lightning.console import seconds, three_digits, with_prefix

METRIC = ranking.Metric()
RATES = ["0.0012098197376602014", "0.00011634859582525738", "0.0077040812489690535"]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (three_digits(0.55678), "0.557"),
        (three_digits(0.9999), "1.00"),
        (three_digits(999.96), "1000"),
        (three_digits(0.0), "0.00"),
        (three_digits(1.234e-5), "1.23e-05"),
        (three_digits(float("inf")), "inf"),
        (three_digits(0.2996, 0.0427), "0.300 ± 0.043"),
        (three_digits(1.234e-5, 2e-6), "(1.23 ± 0.20)e-05"),
        (with_prefix(999_999), "1 M"),
        (with_prefix(2_351_424), "2.35 M"),
        (with_prefix(7), "7"),
        (seconds(0.0183), "18.3 ms"),
        (seconds(99.96), "1 min 40 s"),
        (seconds(12_000), "3 h 20 min"),
    ],
)
def test_three_digits(shown, expected):
    assert shown == expected


def test_values_stay_apart():
    assert [*shortened(RATES).values()] == ["0.00121", "0.000116", "0.0077"]
    near = ["0.001214444", "0.0012149", "1e-3", "null"]
    assert [*shortened(near).values()] == ["0.001214", "0.001215", "1e-3", "null"]
    same = ["12345678", "adamw", "[0.9,0.95]"]
    assert [*shortened(same).values()] == same


def rows_of(seeds=1):
    """Three settings; cost and accuracy differ, the number of parameters does not."""
    found = []
    for number, rate in enumerate(RATES):
        values = {"optimizer.lr": rate, "model.num_heads": str(1 + number % 2), "model.depth": "2"}
        results = {
            "val/loss_best": 0.5 + number, "test/accuracy": 0.9 - 0.1 * number,
            "test/top5_accuracy": 0.99, "test/loss": 1.2345, "parameters": 115114,
            "multiply_adds": 4e5 * 3**number, "step_seconds": 0.0183 * 1.5**number,
            "seconds": 4.18, "num_seeds": seeds, "val/loss_best_std": 0.1,
            "test/accuracy_std": 0.02,
        }  # fmt: skip
        found.append(Trial(number, Path(), (rate,), values, "done", results))
    return ranking.ranked(found, METRIC)


@pytest.mark.parametrize("width", [80, 110, 160])
@pytest.mark.parametrize("seeds", [1, 3])
def test_a_table_fits_the_screen_and_breaks_no_word(width, seeds, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    rows = rows_of(seeds)
    figures = ranking.figures_of(rows, METRIC)
    columns, _ = report.columns_of(rows, figures)
    report.show(rows, columns, Console(width=width))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    head = set(shown.partition("───")[0].split()[3:])  # after the title
    pieces = {c.name: {c.name, *report.broken_name(c.name).split("\n")} for c in columns}
    assert head <= set.union(*pieces.values())
    left_out = re.search(r"too narrow for (.*): see table.md", shown)
    named = left_out[1].split(", ") if left_out else []
    for column in columns:
        assert column.name in named or pieces[column.name] & head
    assert "val/loss_best" not in named
    assert ("0.500 ± 0.100" if seeds > 1 else " 0.500") in shown
    assert "0.00121" in shown
    assert "0.0012098" not in shown


def test_what_is_equal_is_said_once():
    columns, same = report.columns_of(rows_of(), ranking.figures_of(rows_of(), METRIC))
    names = [column.name for column in columns]
    assert names == ["rank", "trial", "optimizer.lr", "model.num_heads", "val/loss_best",
                     "test/accuracy", "multiply_adds", "step_seconds"]  # fmt: skip
    said = report.in_words(rows_of(), same, ["task=vit"])
    assert said.startswith(
        "Equal in all rows: model.depth 2, test/top5_accuracy 0.990, test/loss 1.23, "
        "parameters 115 k, seconds 4.18 s. The trials differ in optimizer.lr, model.num_heads. "
    )
    assert "400 k | 18.3 ms" in report.as_markdown(columns)


@pytest.mark.parametrize("seeds", [1, 3])
def test_no_names_overlap(seeds):
    """Also of values that lie close together; the deviation over seeds is in the picture."""
    figure = report.draw(rows_of(seeds), METRIC)
    figure.canvas.draw()
    for axes in figure.axes:
        boxes = [t.get_window_extent() for t in axes.get_xticklabels() if t.get_text()]
        assert len(boxes) > 1
        for one, other in pairwise(boxes):
            assert not one.overlaps(other)
    lengths = [
        path.vertices[1, 1] - path.vertices[0, 1]
        for bars in figure.axes[0].collections
        for path in bars.get_paths()
    ]
    assert lengths == pytest.approx([0.2] * 3 if seeds > 1 else [])
