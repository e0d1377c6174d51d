"""Out of memory, for real: the batch is halved, the accumulation doubled, the weights the same."""

import json
import re
from pathlib import Path

import pytest
import torch

from attnkit.launch.folder import load_config

CPU = "  DefaultCPUAllocator: can't allocate memory: you tried to allocate"
TASK = """\
# @package _global_
task: hungry
module: {_target_: hungry.Hungry, limit: null}
data: {_target_: hungry.Data, batch_size: 16, augment: null}
trainer: {accelerator: cpu, max_epochs: 2, gradient_clip_val: 0.1}
callbacks: {curves: null}
logger: {tensorboard: null}
"""

# Allocates by the size of the batch: above the limit more than any machine has.
MODULE = """\
import os
import signal

import torch
from lightning import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from attnkit.lightning import ResumableSampler


class StopAt(Callback):
    def __init__(self, batch: int):
        self.batch = batch

    def on_train_batch_start(self, trainer, *args):
        if trainer.fit_loop.total_batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)


class Hungry(LightningModule):
    def __init__(self, limit: float | None, how: str = "tensor", rank: int = 0, after: int = 0,
                 manual: bool = False):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.automatic_optimization = not manual

    def forward(self, x):
        own = self.hparams
        if self.training and own.limit and len(x) > own.limit and self.global_step >= own.after:
            if self.global_rank == own.rank:
                return torch.empty(2**46) if own.how == "tensor" else bytearray(2**62)
        return self.net(x)

    def _step(self, batch, stage):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def training_step(self, batch, index):
        return self._step(batch, "train")

    def validation_step(self, batch, index):
        self._step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5, momentum=0.9)


class Data(LightningDataModule):
    def __init__(self, batch_size: int | None = 16, augment: int | None = None):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        x = torch.randn(77, 5, generator=torch.Generator().manual_seed(7))
        self.set = TensorDataset(x, x.argmax(1) % 3)

    def train_dataloader(self):
        ranks = {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}
        sampler = ResumableSampler(self.set, **ranks, seed=3)
        return DataLoader(self.set, self.batch_size or 77, sampler=sampler)

    def val_dataloader(self):
        return DataLoader(self.set, self.batch_size or 77)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hungry")
    (folder / "task").mkdir()
    (folder / "task" / "hungry.yaml").write_text(TASK)
    (folder / "hungry.py").write_text(MODULE)
    return folder


@pytest.fixture
def hungry(attnkit, folder, monkeypatch):
    monkeypatch.delitem(__import__("sys").modules, "hungry", raising=False)
    return lambda *argv: attnkit("--config-dir", folder, "task=hungry", *argv)


def weights(run):
    state = torch.load(Path(run, "checkpoints/last.ckpt"), weights_only=True)
    return state["state_dict"], state["global_step"]


def results(run):
    return json.loads(Path(run, "results.json").read_text())


def same_training(a, b):
    (ours, steps), (theirs, their_steps) = weights(a), weights(b)
    assert steps == their_steps
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("limit", "how"), [(10, "tensor"), pytest.param(4, "python", marks=pytest.mark.slow)]
)
def test_the_weights_are_those_of_the_full_batch(hungry, limit, how):
    """77 samples: 16 does not divide them, so the last step of an epoch has fewer, 13."""
    assert hungry("run_dir=full").code == 0
    done = hungry(f"module.limit={limit}", f"module.how={how}", "run_dir=tight")
    assert done.code == 0, done.err
    tries = {10: 1, 4: 2}[limit]
    same_training("tight", "full")
    assert results("tight")["oom_retries"] == tries
    assert "oom_retries" not in results("full")
    config = load_config(Path("tight"))
    assert config["data"]["batch_size"] == 16 // 2**tries
    assert config["trainer"]["accumulate_grad_batches"] == 2**tries
    said = re.findall(r"out of memory with batches of (\d+): again with (\d+)", done.out)
    assert said == [("16", "8"), ("8", "4")][:tries]
    assert "again with 8, 2 to a step" in Path("tight/run.log").read_text()
    epochs = Path("tight/metrics.csv").read_text()
    assert epochs.count("\n") == Path("full/metrics.csv").read_text().count("\n")


def test_it_goes_on_from_the_last_checkpoint_and_stays_small(hungry, folder, monkeypatch):
    """Out of memory in the second of two epochs; resumed, the batch is the smaller one."""
    assert hungry("run_dir=full", "trainer.max_epochs=3").code == 0
    done = hungry("module.limit=8", "module.after=7", "trainer.max_epochs=2", "run_dir=late")
    assert done.code == 0, done.err
    assert results("late")["oom_retries"] == 1
    done = hungry("resume=late", "trainer.max_epochs=3")
    assert done.code == 0, done.err
    assert "out of memory" not in done.out
    same_training("late", "full")


def test_a_place_within_an_epoch_is_found_again(hungry):
    """Stopped after 3 of the 5 batches of an epoch, and resumed where only half of one fits."""
    assert hungry("run_dir=full").code == 0
    stop = "+callbacks.now={_target_: hungry.StopAt, batch: 7}"
    done = hungry("module.limit=8", "module.after=8", stop, "run_dir=stopped")
    assert done.code == 143, done.err
    assert weights("stopped")[1] == 8
    done = hungry("resume=stopped", "callbacks.now=null")
    assert done.code == 0, done.err
    assert results("stopped")["oom_retries"] == 1
    same_training("stopped", "full")


def test_an_odd_batch_is_rounded_down_and_numbers_of_batches_doubled(hungry):
    done = hungry("module.limit=8", "data.batch_size=15", "trainer.limit_batches=3", "run_dir=odd")
    assert done.code == 0, done.err
    assert "again with 7, 2 to a step" in done.out
    assert "a step has 14 instead of 15" in done.out
    assert load_config(Path("odd"))["trainer"]["limit_batches"] == 6
    assert results("odd")["steps"] == 6


@pytest.mark.parametrize(
    ("argv", "first", "second"),
    [
        ("module.limit=1", "out of memory with batches of 2, halved 3 times", CPU),
        ("data.batch_size=1 module.limit=0.5 module.how=python", "out of memory with", "  Memory"),
        ("data.batch_size=null", "out of memory, and no batch to halve: data.batch_size=null", CPU),
        ("~data.batch_size", "out of memory, and no batch to halve: this data has no data.b", CPU),
        ("data.batch_size=1 module.limit=0.5", "out of memory with batches of 1", CPU),
        ("trainer.oom_retry=false", "out of memory in ", CPU),
        ("module.manual=true trainer.gradient_clip_val=null", "out of memory in ", CPU),
    ],
    ids=["no use", "python", "null", "no batch", "one", "off", "steps itself"],
)
def test_one_clear_error(hungry, argv, first, second):
    done = hungry("module.limit=9", *argv.split(), "run_dir=run")
    assert done.code == 1
    said = done.err.strip().splitlines()
    said = said[next(i for i, line in enumerate(said) if line.startswith("attnkit:")) :]
    assert len(said) <= 3
    assert said[0].startswith(f"attnkit: {first}"), said
    assert said[1].startswith(second), said
    assert done.out.count("again with") == (3 if "module.limit=1" in argv else 0)
    log = Path("run/run.log").read_text()
    assert "allocate" in log or "MemoryError" in log


def test_a_check_says_so(hungry):
    done = hungry("run=check", "module.limit=8")
    assert done.code == 1
    said = done.err.strip().splitlines()[-3:]
    assert said[0] == "attnkit: out of memory with batches of 16"
    assert said[2] == "  training would try again with half of it, at most 3 times"
    assert not list(Path().iterdir())


def test_a_setting_that_is_none(hungry):
    done = hungry("trainer.oom_retry=perhaps")
    assert done.code == 2
    assert "trainer.oom_retry: expected bool, got 'perhaps'" in done.err
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_all_ranks_try_again_together(hungry):
    """Only one of two has too little."""
    done = hungry("trainer=cpu_ddp", "data.batch_size=8", "run_dir=full")
    assert done.code == 0, done.err
    done = hungry(
        "trainer=cpu_ddp", "data.batch_size=8", "module.limit=4", "module.rank=1", "run_dir=two"
    )
    assert done.code == 0, done.err
    assert "again with 4, 2 to a step" in done.out
    assert results("two")["oom_retries"] == 1
    same_training("two", "full")
