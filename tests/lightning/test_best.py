"""The best epoch: the direction of each metric, ties, NaN, and which file holds it."""

import math
import re
import shutil
import warnings
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

from attnkit.launch import folder as folders
from attnkit.lightning import BestCheckpoint, EpochLines, LastCheckpoint, Plateau
from attnkit.lightning.best import mode_of, rank
from attnkit.lightning.modules.checks import direction
from attnkit.tasks.captioning import ImageCaptioning
from attnkit.tasks.graphs import LinkPrediction, NodeClassification
from attnkit.tasks.image_classification import ImageClassification

NAN = math.nan


@pytest.mark.parametrize(
    "metrics",
    [
        ImageClassification(
            nn.Identity(), num_classes=7, image_size=8, in_channels=1, mean=[0.0], std=[1.0]
        ).val_metrics,
        NodeClassification(nn.Identity(), num_classes=2, in_channels=3).val_metrics,
        LinkPrediction(nn.Identity()).val_metrics,
        ImageCaptioning.metrics(None),
    ],
    ids=["images", "nodes", "links", "captions"],
)
def test_every_metric_of_a_task_knows_its_direction(metrics):
    for name, metric in metrics.items():
        if name != "loss":
            assert metric.higher_is_better is not None, name
            assert mode_of(f"val/{name}") == ("max" if metric.higher_is_better else "min"), name
        assert direction(f"val/{name}", metric) == mode_of(f"val/{name}")
        assert BestCheckpoint(monitor=f"val/{name}").mode == mode_of(f"val/{name}")
        parameter = nn.Parameter(torch.zeros(1))
        assert Plateau(SGD([parameter]), f"val/{name}").mode == mode_of(f"val/{name}")


@pytest.mark.parametrize("make", [BestCheckpoint, partial(Plateau, SGD([nn.Parameter()]))])
def test_an_unknown_metric_needs_a_mode(make):
    with pytest.raises(ValueError, match=r"mode: expected min or max; .* 'val/score' is better"):
        make(monitor="val/score")
    assert make(monitor="val/score", mode="max").mode == "max"


class Logs(nn.Module):
    """Values of val/score and val/loss for each epoch, for a network to log."""

    def __new__(cls, small_net, scores, losses=None):
        class Net(small_net):
            def validation_step(self, batch, batch_idx):
                epoch = self.current_epoch
                if losses is not None:
                    self.log("val/loss", torch.tensor(losses[epoch]))
                self.log("val/score", torch.tensor(scores[epoch]))

        return Net()


class Killed(Exception):
    """Takes the place of a kill between two epochs."""


def fit(net, loader, make_trainer, folder, epochs, *, k=1, resume=None, until=None):
    """Train, or go on, until an epoch where that is given; the checkpoint of the best."""
    inside = folder / folders.CHECKPOINTS
    common = {"dirpath": inside, "enable_version_counter": False, "every_seconds": 0}
    best = BestCheckpoint(filename="best", save_top_k=k, monitor="val/score", mode="max", **common)
    lines = EpochLines()

    class Stop(LastCheckpoint):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == until:
                raise Killed

    callbacks = [lines, best, Stop(filename="last", **common)]
    trainer = make_trainer(max_epochs=epochs, callbacks=callbacks, enable_checkpointing=True)
    with suppress(Killed):
        trainer.fit(net, loader, loader, ckpt_path=resume, weights_only=True)
    return best, lines


def held(path):
    return torch.load(path, weights_only=True)["epoch"] + 1


SCORES = [3.0, 9.0, NAN, 9.0, 1.0, 2.0, 9.0]
LOSSES = [1.0, 0.9, 0.1, 0.5, 0.4, 0.3, 0.6]


@pytest.mark.parametrize(
    ("how", "k"),
    [("stays", 1), ("stays", -1), ("moved", 2), ("moved", -1), ("copied", 1), ("copied", 3)],
)
def test_the_file_is_the_argmax(how, k, small_net, loader, make_trainer, tmp_path, capfd):
    """Of the scores, and among equals of the smallest loss, where a run goes on in its folder."""
    net = Logs(small_net, SCORES, LOSSES)
    run = tmp_path / "run"
    one = torch.utils.data.DataLoader(loader.dataset, batch_size=55)
    best, _ = fit(net, one, make_trainer, run, 7, k=k, until=4)
    assert held(folders.checkpoint(str(run))) == 4
    if how == "moved":
        run = run.rename(tmp_path / "moved")
    elif how == "copied":
        run = shutil.copytree(run, tmp_path / "copy")
        shutil.copy(tmp_path / "run/checkpoints/last.ckpt", run / "checkpoints")  # another mtime
    last = run / "checkpoints/last.ckpt"
    best, lines = fit(net, one, make_trainer, run, 7, k=k, resume=last)
    files = {path.name: held(path) for path in (run / "checkpoints").glob("*.ckpt")}
    assert held(folders.checkpoint(str(run))) == 4
    assert best.best_model_path == str(run / "checkpoints/best.ckpt")
    assert float(best.best_model_score) == best.best["val/score"] == 9.0
    assert (best.best["epoch"], best.best["val/loss"]) == (4, 0.5)
    assert lines.best["epoch"] == 4
    assert "best: 4" in capfd.readouterr().out
    # what is kept beside it are the next best
    pairs = enumerate(zip(SCORES, LOSSES, strict=True), 1)
    figures = {epoch: {"val/score": score, "val/loss": loss} for epoch, (score, loss) in pairs}
    order = sorted(figures, key=lambda epoch: rank(figures[epoch], "val/score", "max"))
    files.pop("last.ckpt")
    assert sorted(files.values()) == sorted(order[: k if k > 0 else None])
    assert {p.rpartition("/")[2]: int(f["epoch"]) for p, f in best.kept.items()} == files


def test_a_best_that_is_gone_is_said(small_net, loader, make_trainer, tmp_path):
    net = Logs(small_net, SCORES, LOSSES)
    fit(net, loader, make_trainer, tmp_path, 7, k=2, until=5)
    inside = tmp_path / "checkpoints"
    (inside / "best.ckpt").unlink()
    with pytest.warns(UserWarning, match=r"best\.ckpt: not there or not as it was noted"):
        fit(net, loader, make_trainer, tmp_path, 6, k=2, resume=inside / "last.ckpt")
    assert held(inside / "best.ckpt") == 2  # the second, which was kept under another name


@pytest.mark.parametrize(
    ("scores", "losses", "epoch", "said"),
    [
        ([0.0] * 3, [3.0, 1.0, 2.0], 2, "was 0 in all 3 validations.*by val/loss: epoch 2"),
        ([0.0] * 3, None, 1, "was 0 in all 3 validations.*as the first: epoch 1"),
        ([NAN] * 3, [3.0, 2.0, NAN], 2, "was NaN in all 3 validations.*by val/loss: epoch 2"),
        ([NAN, 1.0, NAN], [3.0, 2.0, 1.0], 2, None),
        ([0.0, 1.0, 1.0], [3.0, 2.0, 1.0], 3, None),
    ],
)
def test_a_metric_that_cannot_choose_is_said(
    scores, losses, epoch, said, small_net, loader, make_trainer, tmp_path
):
    net = Logs(small_net, scores, losses)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        best, _ = fit(net, loader, make_trainer, tmp_path, 3)
    assert held(best.best_model_path) == best.best["epoch"] == epoch
    messages = [str(w.message) for w in found if "can't tell which" in str(w.message)]
    assert len(messages) == (said is not None)
    for message in messages:
        assert re.search(said, message)


def test_a_metric_that_was_never_there_is_said(small_net, loader, make_trainer, tmp_path):
    best = BestCheckpoint(dirpath=tmp_path, monitor="val/loss")
    trainer = make_trainer(callbacks=[best], enable_checkpointing=True, limit_val_batches=0)
    with pytest.warns(UserWarning, match="val/loss was never logged: no epoch is the best"):
        trainer.fit(small_net(), loader, loader)


def test_a_later_best_than_was_noted_counts(small_net, loader, make_trainer, tmp_path):
    """As after a kill: the run goes on from an older checkpoint than the file of the best is of."""
    net = Logs(small_net, [1.0, 2.0, 3.0, 2.5], [1.0] * 4)
    inside = tmp_path / "checkpoints"
    fit(net, loader, make_trainer, tmp_path, 4, until=2)
    shutil.copy(inside / "last.ckpt", tmp_path / "older.ckpt")
    fit(net, loader, make_trainer, tmp_path, 4, until=3, resume=inside / "last.ckpt")
    assert held(inside / "best.ckpt") == 3
    best, _ = fit(net, loader, make_trainer, tmp_path, 4, resume=tmp_path / "older.ckpt")
    assert held(inside / "best.ckpt") == best.best["epoch"] == 3
    assert best.best["val/score"] == 3.0
