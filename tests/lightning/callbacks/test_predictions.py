import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning import LightningModule
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from attnkit.lightning import PredictionsFile

EXPECTED = {
    "plain": range(1, 14),
    "parts": [1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13],
    "one": [1, 2],
    "none": [],
    "whole": [1, 2, 3],
    "two": [1, 2, 3, 4, 1, 2, 3, 1, 2, 3],
}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_order_of_the_data(tmp_path, devices):
    """Samples that alternate between processes, parts in one piece, an empty part, no loader."""
    script = Path(__file__).with_name("predicting.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path, str(devices)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name, numbers in EXPECTED.items():
        lines = [f"{number},{number**2:.6f},a {number:.4f}\n" for number in numbers]
        written = (tmp_path / name / "predictions.csv").read_bytes().decode()
        assert written.replace("\r\n", "\n") == "number,square,best\n" + "".join(lines), name
        for rank in range(devices):
            assert f"{name} rank {rank}: {len(numbers)} rows\n" in done.stdout


class Labels(LightningModule):
    def predict_step(self, batch, batch_idx):
        return batch[0]


@pytest.mark.parametrize("sampler", [None, DistributedSampler])
def test_of_any_step_in_a_file_of_any_name(tmp_path, make_trainer, sampler):
    """Shuffled or not, the order is that of the data; a tensor is one column."""
    data = TensorDataset(torch.arange(7))
    sampler = sampler and sampler(data, 1, 0, shuffle=True)
    writer = PredictionsFile(tmp_path / "deep" / "labels.csv")
    trainer = make_trainer(callbacks=[writer])
    returned = trainer.predict(Labels(), DataLoader(data, batch_size=2, sampler=sampler))
    if sampler:
        assert torch.cat(returned).tolist() != list(range(7))
    with (tmp_path / "deep" / "labels.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["prediction"], *([str(n)] for n in range(7))]
    assert writer.num_rows == 7
    trainer.predict(Labels(), DataLoader(data, batch_size=2))
    assert writer.num_rows == 7
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["labels.csv"]
