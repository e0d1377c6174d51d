import json

import pytest
import torch
from lightning import Callback
from lightning.pytorch.loggers import CSVLogger

from attnkit.lightning import ResultsFile, UserError


def test_every_stage_adds_its_figures(small_net, loader, make_trainer, tmp_path):
    path = tmp_path / "new" / "results.json"
    trainer = make_trainer(callbacks=[ResultsFile(path)])
    module = small_net()
    trainer.fit(module, loader, loader)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    after_fit = json.loads(path.read_text())
    trainer.test(module, loader, verbose=False)
    results = json.loads(path.read_text())

    assert metrics.keys() == {"train/loss", "val/loss", "val/accuracy"}
    assert metrics.items() <= results.items()
    assert results["test/accuracy"] == trainer.callback_metrics["test/accuracy"].item()
    assert (results["epochs"], results["steps"]) == (2, 10)
    assert all(type(value) in (int, float) for value in results.values())
    assert 0 < after_fit["seconds"] < results["seconds"]
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_stands_in_the_log_folder_by_default(small_net, loader, make_trainer, tmp_path):
    logger = CSVLogger(tmp_path, name="run")
    trainer = make_trainer(callbacks=[ResultsFile()], logger=logger)
    trainer.validate(small_net(), loader, verbose=False)
    assert "val/loss" in json.loads((tmp_path / "run/version_0/results.json").read_text())


def test_numbers_of_other_callbacks(small_net, loader, make_trainer, tmp_path):
    class Answer(Callback):
        results = {"answer": 42}  # noqa: RUF012

    path = tmp_path / "results.json"
    make_trainer(callbacks=[ResultsFile(path), Answer()]).fit(small_net(), loader)
    assert json.loads(path.read_text())["answer"] == 42


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
