"""Checkpoints of short epochs: seldom on the disk, never wrong there."""

import time
from collections import Counter, OrderedDict

import pytest
import torch
from lightning import Callback

from attnkit.lightning import BestCheckpoint, LastCheckpoint


class Writes(Callback):
    """Which epoch each file was written in, and the number of epochs that were done."""

    def __init__(self, folder):
        self.folder, self.times, self.found = folder, {}, []

    def on_train_epoch_start(self, trainer, pl_module):
        for path in self.folder.glob("*.ckpt"):
            changed = path.stat().st_mtime_ns
            if self.times.get(path.name) != changed:
                self.times[path.name] = changed
                self.found.append((path.name, trainer.current_epoch))


class Lists(Callback):
    """A state of all kinds, which goes on changing."""

    def __init__(self):
        self.state = {"list": [[]], "tuple": ([], 1), "counts": Counter(), "ordered": OrderedDict()}
        self.state["set"] = set()
        self.state["to come"] = 2 * torch.ones(1, requires_grad=True)  # its gradient

    def on_train_epoch_start(self, trainer, pl_module):
        epoch = trainer.current_epoch
        self.state["list"][0].append(epoch)
        self.state["tuple"][0].append(torch.tensor(epoch))
        self.state["counts"][str(epoch)] = 2
        self.state["ordered"][epoch] = None
        self.state["set"].add(epoch)

    def state_dict(self):
        return self.state


def improving(small_net):
    """A network whose val/loss improves in every epoch."""

    class Improving(small_net):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", torch.tensor(1.0 / (1 + self.current_epoch)))

    return Improving()


def fit(net, loader, make_trainer, folder, seconds, epochs=4, **options):
    common = {"dirpath": folder, "enable_version_counter": False, "every_seconds": seconds}
    best = BestCheckpoint(filename="best", monitor="val/loss", **common)
    writes = Writes(folder)
    callbacks = [best, LastCheckpoint(filename="last", **common), writes]
    extra = options.pop("callbacks", [])
    trainer = make_trainer(
        max_epochs=epochs, callbacks=[*extra, *callbacks], enable_checkpointing=True, **options
    )
    trainer.fit(net, loader, loader)
    return best, writes


def epoch_of(path):
    return torch.load(path, weights_only=True)["epoch"]


@pytest.mark.parametrize("seconds", [0, 3600])
def test_at_the_end_both_are_those_of_the_last_epoch(
    seconds, small_net, loader, make_trainer, tmp_path
):
    net = improving(small_net)
    best, writes = fit(net, loader, make_trainer, tmp_path, seconds)
    assert best.best_model_path == str(tmp_path / "best.ckpt")
    for name in ("best", "last"):
        checkpoint = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        assert checkpoint["epoch"] == 3
        for key, value in net.state_dict().items():
            torch.testing.assert_close(checkpoint["state_dict"][key], value)
    between = [("best.ckpt", 1), ("last.ckpt", 1)]
    if seconds == 0:
        between = [(name, epoch) for epoch in (1, 2, 3) for name in ("best.ckpt", "last.ckpt")]
    assert sorted(writes.found) == sorted(between)


def test_what_is_held_is_the_state_of_its_epoch(small_net, loader, make_trainer, tmp_path):
    class Once(small_net):
        """Best in epoch 1 (of 0, 1, 2), which is held while epoch 2 trains."""

        kept = None

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", torch.tensor([2.0, 1.0, 3.0][self.current_epoch]))

        def on_train_epoch_end(self):
            if self.current_epoch == 1:
                self.kept = {k: v.clone() for k, v in self.state_dict().items()}

    net = Once()
    fit(net, loader, make_trainer, tmp_path, 3600, epochs=3, callbacks=[Lists()])
    checkpoint = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert checkpoint["epoch"] == 1
    for key, value in net.kept.items():
        torch.testing.assert_close(checkpoint["state_dict"][key], value)
    assert not torch.equal(net.kept[key], net.state_dict()[key])
    assert checkpoint["callbacks"]["Lists"] == {
        "list": [[0, 1]],
        "tuple": ([torch.tensor(0), torch.tensor(1)], 1),
        "counts": Counter({"0": 2, "1": 2}),
        "ordered": OrderedDict({0: None, 1: None}),
        "set": {0, 1},
        "to come": torch.tensor([2.0]),
    }


class At(Callback):
    """Something to do at the start of an epoch."""

    def __init__(self, epoch, what):
        self.epoch, self.what = epoch, what

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            self.what(trainer)


def test_it_is_written_before_any_other_checkpoint(small_net, loader, make_trainer, tmp_path):
    def save(trainer):
        assert epoch_of(tmp_path / "best.ckpt") == 0
        trainer.save_checkpoint(tmp_path / "mine.ckpt")
        assert epoch_of(tmp_path / "best.ckpt") == 2

    net = improving(small_net)
    fit(net, loader, make_trainer, tmp_path, 3600, callbacks=[At(3, save)])
    assert (tmp_path / "mine.ckpt").exists()


def test_it_is_written_when_its_time_has_come(
    small_net, loader, make_trainer, tmp_path, monkeypatch
):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found = []

    class Clock(Callback):
        """Ten seconds go by in epoch 3; every epoch is better."""

        def on_train_epoch_start(self, trainer, pl_module):
            now[0] += 10.0 if trainer.current_epoch == 3 else 0.0

        def on_validation_start(self, trainer, pl_module):
            if not trainer.sanity_checking:
                found.append(epoch_of(tmp_path / "best.ckpt") if trainer.current_epoch else None)

    best = BestCheckpoint(
        dirpath=tmp_path, filename="best", monitor="val/loss", enable_version_counter=False
    )
    trainer = make_trainer(max_epochs=5, callbacks=[best, Clock()], enable_checkpointing=True)
    trainer.fit(improving(small_net), loader, loader)
    # that of epoch 2, held, is written in the first batch after the ten seconds
    assert found == [None, 0, 0, 2, 2]
    assert epoch_of(tmp_path / "best.ckpt") == 4


def test_files_of_several_names_are_all_written(small_net, loader, make_trainer, tmp_path):
    best = BestCheckpoint(
        dirpath=tmp_path, filename="{epoch}", monitor="val/loss", save_top_k=3, every_seconds=3600
    )
    trainer = make_trainer(max_epochs=5, callbacks=[best], enable_checkpointing=True)
    trainer.fit(improving(small_net), loader, loader)
    assert {path.name: epoch_of(path) for path in tmp_path.glob("*.ckpt")} == {
        f"epoch={epoch}.ckpt": epoch for epoch in (2, 3, 4)
    }


def test_it_is_written_when_training_fails(small_net, loader, make_trainer, tmp_path):
    def fail(trainer):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(improving(small_net), loader, make_trainer, tmp_path, 3600, callbacks=[At(3, fail)])
    assert epoch_of(tmp_path / "best.ckpt") == 2
    assert epoch_of(tmp_path / "last.ckpt") == 0


def test_early_stopping_leaves_the_last_epoch(small_net, loader, make_trainer, tmp_path):
    def stop(trainer):
        trainer.should_stop = True

    net = improving(small_net)
    fit(net, loader, make_trainer, tmp_path, 3600, epochs=9, callbacks=[At(5, stop)])
    assert epoch_of(tmp_path / "last.ckpt") == 5


@pytest.mark.parametrize("kind", [BestCheckpoint, LastCheckpoint])
def test_negative_seconds_are_refused(kind):
    with pytest.raises(ValueError, match="every_seconds: expected at least 0, got -1"):
        kind(every_seconds=-1)
