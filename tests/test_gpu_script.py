"""docs/benchmarks/gpu.py, which is for a GPU, runs on a CPU with small sizes."""

import argparse
import importlib
import json
import subprocess
import sys

import pytest

QUICK = ("choice", "windows")
SLOW = ("doctor", "kernels", "syncs", "edges", "tests", "jobs", "vit", "decoding")


@pytest.fixture
def benchmarks(repository, monkeypatch):
    folder = repository / "docs" / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.parametrize(
    "part", [*QUICK, *(pytest.param(part, marks=pytest.mark.slow) for part in SLOW)]
)
def test_each_part_has_rows(part, benchmarks, tmp_path):
    module = importlib.import_module(f"gpu_parts.{part}")
    rows = list(module.rows("cpu", argparse.Namespace(folder=tmp_path, cifar=None)))
    assert rows
    said = json.dumps(rows)
    assert "NaN" not in said
    for row in rows:
        assert row.get("failures", "none") == "none", row
        assert row.get("exit code", 0) == 0, row
        assert row.get("failed", 0) == 0, row


@pytest.mark.slow
def test_a_part_that_fails_loses_nothing_else(benchmarks, tmp_path):
    """`cifar` finds no images; `windows` has its row all the same."""
    (tmp_path / "empty").mkdir()
    command = [sys.executable, benchmarks / "gpu.py", tmp_path / "out", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--parts", "windows", "cifar", "--cifar", tmp_path / "empty"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "out" / "gpu.json").read_text())["parts"]
    assert list(parts) == ["windows", "cifar"]
    assert "needs CUDA" in parts["windows"]["rows"][0]["windows"]
    assert parts["cifar"]["rows"][0]["exit code"] == 2
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert "### windows" in page
    assert "torch " in page
