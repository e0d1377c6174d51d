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
