import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_two_ranks_write_one_of_everything(tmp_path):
    script = Path(__file__).with_name("two_ranks.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    for stage in ("val", "train", "test"):
        assert done.stderr.count(f"attention kernels in the first {stage} batch") == 1

    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    maps = {f"layers/{name}.png" for name in ("epoch_001", "epoch_002", "test")}
    maps |= {f"interpret/{name}.png" for name in ("epoch_001", "epoch_002", "test", "scores")}
    assert files == {"best.ckpt", "learning_curves.png", "results.json"} | maps

    results = json.loads((tmp_path / "results.json").read_text())
    assert results["steps"] == 8  # 53 in batches of 7, on two ranks: 4 an epoch
    assert results["kernels/train/flash"] == 1
    assert results["train/samples_per_second"] > 0
    # the best checkpoint, the average, on the data it was validated on
    assert results["test/loss"] == pytest.approx(results["val/loss"], rel=1e-5)
