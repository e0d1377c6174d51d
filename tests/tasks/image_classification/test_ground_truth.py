"""What the maps of a trained ViT find, by the table's own script: the bars, with one seed."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("ground_truth")
    finally:
        sys.path.remove(str(BENCHMARKS))


def ratios(rows):
    return {row["method"]: row["score"] / row["chance"] for row in rows}


@pytest.fixture(scope="module")
def of_marks(script):
    """Mass on the mark over chance, with strength 1 and 0."""
    return [ratios(script.rows_of(f"planted_shortcut_{n}", "vit", 0, 40)) for n in (1, 0)]


@pytest.mark.slow
def test_the_needle_is_found(script):
    rows = script.rows_of("needle_digits", "vit", 0, 40)
    assert rows[0]["right"] >= 0.95
    over = ratios(rows)
    oracle = over.pop("oracle")
    assert oracle == pytest.approx(16)
    assert max(over.values()) >= 4
    assert max(over.values()) < oracle
    assert over["random"] == pytest.approx(1, abs=0.3)
    assert over["centre"] == pytest.approx(1, abs=0.4)


@pytest.mark.slow
def test_a_shortcut_is_found_where_there_is_one(of_marks):
    used, unused = of_marks
    finding = {name for name in used if used[name] >= 5 and unused[name] <= 1.5}
    assert finding >= {"relevance", "integrated_gradients", "occlusion"}
    assert not finding & {"attention", "legrad", "input_gradient", "random", "centre", "oracle"}


def test_rows_become_tables(script, tmp_path):
    found = {
        "relevance": {"score": (0.25, 0.375), "pointing": 0.5},
        "oracle": {"score": (1.0, 1.0)},
    }
    asked = []

    def rows_of(truth, model, seed):
        asked.append((truth, model, seed))
        known = {"measure": "mass", "chance": 0.0625, "right": 0.96, "num": 40}
        rows = [
            {"method": name, **known, **row, "score": row["score"][seed]}
            for name, row in found.items()
        ]
        rows[0]["class_sensitivity"] = 0.5 if truth == "scenes" else -0.001
        return rows

    cases = [("scenes", "vit"), ("needles", "vit")]
    for _ in range(2):  # the second time from the file
        rows = script.kept(tmp_path / "rows.jsonl", 2, iter(cases), rows_of)
    assert asked == [(*case, seed) for seed in (0, 1) for case in cases]
    assert script.overview(rows).splitlines() == [
        "**vit**",
        "",
        "| map | scenes | needles | class sensitivity | random weights |",
        "| --- | --- | --- | --- | --- |",
        "| `relevance` | 5.00 ± 1.41 | 5.00 ± 1.41 | 0.00 to 0.50 | – |",
        "| `oracle` | 16.00 ± 0.00 | 16.00 ± 0.00 | – | – |",
        "| answered right | 0.96 ± 0.00 | 0.96 ± 0.00 |  |  |",
        "| seeds | 2 | 2 |  |  |",
    ]
    shown = script.details(rows).splitlines()
    assert shown[0] == "**vit, scenes**: 40 scored a seed, chance 0.062"
    assert shown[2] == "| map | found | pointing | class sensitivity |"
    assert shown[4] == "| `relevance` | 5.00 ± 1.41 | 0.50 ± 0.00 | 0.50 ± 0.00 |"
    assert shown[5] == "| `oracle` | 16.00 ± 0.00 | – | – |"
