"""results.json and predictions.csv: what each stage adds, and the order of the data."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from attnkit.lightning import PredictionsFile, ResultsFile, UserError


class Answer(Callback):
    results = {"answer": 42}  # noqa: RUF012


def test_every_stage_adds_its_figures(small_net, loader, make_trainer, tmp_path):
    path = tmp_path / "new" / "results.json"
    trainer = make_trainer(callbacks=[ResultsFile(path), Answer()])
    module = small_net()
    trainer.fit(module, loader, loader)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    after_fit = json.loads(path.read_text())
    trainer.test(module, loader, verbose=False)
    results = json.loads(path.read_text())

    assert metrics.keys() == {"train/loss", "val/loss", "val/accuracy"}
    assert metrics.items() <= results.items()
    assert results["test/accuracy"] == trainer.callback_metrics["test/accuracy"].item()
    assert results["answer"] == 42
    assert (results["epochs"], results["steps"]) == (2, 10)
    assert all(type(value) in (int, float) for value in results.values())
    assert 0 < after_fit["seconds"] < results["seconds"]
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_stands_in_the_log_folder_by_default(small_net, loader, make_trainer, tmp_path):
    logger = CSVLogger(tmp_path, name="run")
    trainer = make_trainer(callbacks=[ResultsFile()], logger=logger)
    trainer.validate(small_net(), loader, verbose=False)
    assert "val/loss" in json.loads((tmp_path / "run/version_0/results.json").read_text())


def test_what_is_not_finite_is_left_out_and_said(small_net, loader, make_trainer, tmp_path):
    class Nan(small_net):
        def validation_step(self, batch, batch_idx):
            self.log("val/nan", torch.tensor(float("nan")))
            self.log("val/one", 1.0)

    path = tmp_path / "results.json"
    with pytest.warns(UserWarning, match="val/nan is nan and left out"):
        make_trainer(callbacks=[ResultsFile(path)]).fit(Nan(), loader, loader)
    results = json.loads(path.read_text())
    assert "val/nan" not in results
    assert results["val/one"] == 1.0


def test_seconds_go_on_after_a_resume(small_net, loader, make_trainer, tmp_path):
    trainer = make_trainer(callbacks=[ResultsFile(tmp_path / "a.json")])
    trainer.fit(small_net(), loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    (state,) = [s for name, s in checkpoint["callbacks"].items() if name.startswith("ResultsFile")]
    state["seconds"] += 1000
    torch.save(checkpoint, tmp_path / "a.ckpt")

    trainer = make_trainer(callbacks=[ResultsFile(tmp_path / "b.json")], max_epochs=3)
    trainer.fit(small_net(), loader, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert json.loads((tmp_path / "b.json").read_text())["seconds"] > 1000


def test_a_file_that_is_no_json_is_left_alone(small_net, loader, make_trainer, tmp_path):
    path = tmp_path / "results.json"
    path.write_text("not json")
    with pytest.raises(UserError, match=r"results.json: expected a results file in JSON"):
        make_trainer(callbacks=[ResultsFile(path)]).fit(small_net(), loader)
    assert path.read_text() == "not json"


# --- predictions ----------------------------------------------------------------------------------

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
