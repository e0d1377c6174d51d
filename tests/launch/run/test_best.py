"""Choosing the best from the command line: the direction of a metric, ties, NaN, several files."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from attnkit.launch.sweep.ranking import Metric

SCORED = """\
import torch
from mine_of_the_tests import Mine


class Scored(Mine):
    def __init__(self, scores, losses=None, name="val/score", **kwargs):
        super().__init__(11, **kwargs)
        self.save_hyperparameters()

    def validation_step(self, batch, i):
        losses = self.hparams.losses or [1.0] * 9
        self.log("val/loss", losses[self.current_epoch])
        self.log(self.hparams.name, float(self.hparams.scores[self.current_epoch]))
"""


@pytest.fixture
def scored(mine, hers):
    (hers / "scored.py").write_text(SCORED)
    return lambda *words: mine("module._target_=scored.Scored", "~module.width", *words)


def results(folder="run"):
    return json.loads(Path(folder, "results.json").read_text())


def held(folder="run"):
    return torch.load(Path(folder, "checkpoints/best.ckpt"), weights_only=True)["epoch"] + 1


def test_the_metric_alone_is_enough(scored):
    """No mode: not the worst epoch, for whatever follows it; the saved configuration says so."""
    done = scored(
        "run_dir=run", "callbacks=early_stopping", "trainer.max_epochs=4",
        "module.name=val/accuracy", "module.scores=[0.2,0.9,0.4,0.6]", "callbacks.curves=null",
        "callbacks.checkpoint.monitor=val/accuracy",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert (held(), results()["best_epoch"]) == (2, 2)
    assert results()["val/accuracy_best"] == pytest.approx(0.9)
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["callbacks"]["checkpoint"]["mode"] == "max"
    assert config["callbacks"]["early_stopping"]["mode"] == "max"
    assert Metric.of(config).maximize
    assert Metric.of({"callbacks": {"checkpoint": {"monitor": "val/accuracy"}}}).maximize


@pytest.mark.parametrize("k", [2, -1])
def test_of_several_files_the_best_is_the_one_reported(scored, k):
    done = scored(
        "run_dir=run", "module.scores=[3,9,1,2]", "callbacks.checkpoint.monitor=val/score",
        "callbacks.checkpoint.mode=max", f"callbacks.checkpoint.save_top_k={k}",
        "trainer.max_epochs=4",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert (held(), results()["best_epoch"], results()["val/score_best"]) == (2, 2, 9)
    assert len(list(Path("run/checkpoints").glob("best*.ckpt"))) == (2 if k == 2 else 4)


def test_nan_in_every_epoch(scored, attnkit, hers):
    """The run finishes, says so and has results, and may go on."""
    done = scored(
        "run_dir=run", "module.scores=[nan,nan,nan,nan]", "module.losses=[4,2,3,1]",
        "callbacks.checkpoint.monitor=val/score", "callbacks.checkpoint.mode=max",
        "trainer.max_epochs=3",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "val/score was NaN in all 3 validations" in done.out + done.err
    assert (held(), results()["best_epoch"], results()["val/loss_best"]) == (2, 2, 2)
    assert "val/score_best" not in results()
    assert results()["test/loss"] > 0
    done = attnkit("--config-dir", hers, "resume=run", "trainer.max_epochs=4")
    assert done.code == 0, done.err
    assert "val/score was NaN in all 4 validations" in done.out + done.err
    assert (held(), results()["best_epoch"]) == (4, 4)
