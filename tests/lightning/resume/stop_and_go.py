"""A script for test_resume: stop a plain Trainer at every step, resume, compare with the whole run.

    python stop_and_go.py FOLDER [key=value …]      also under torchrun

Everything that could differ is on: dropout, batch norm, shuffling, noise from three libraries in
the data and in the step, EMA, accumulation, a schedule, clipping. The last line is the stops after
which anything did.
"""

import json
import logging
import os
import random
import signal
import sys
import warnings
from pathlib import Path

import lightning
import numpy as np
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from attnkit.lightning import (
    EMA,
    ExactResume,
    FiniteLoss,
    ResumableSampler,
    SafeCheckpoints,
    SaveOnSignal,
    StoppedBySignal,
)
from attnkit.lightning.resume.signals import fork_apart

OPTIONS = {"workers": 0, "accumulate": 2, "interval": 1.0, "every": 1, "sampler": 0}
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


def noise():
    return torch.randn(5) / 9 + random.random() / 9 + float(np.random.rand()) / 9


class Noisy(Dataset):
    def __init__(self, noisy=True):
        self.noisy = noisy

    def __len__(self):
        return 23 * WORLD

    def __getitem__(self, number):
        x = torch.randn(5, generator=torch.Generator().manual_seed(number))
        return (x + noise() if self.noisy else x), number % 3


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(5, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 3)
        )
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x + noise()), y)
        self.mean.update(loss.detach())
        options = {"on_step": False, "on_epoch": True, "batch_size": len(x)}
        self.log("train/loss", loss, **options)
        self.log("train/mean", self.mean, **options)
        self.log("train/largest", loss, reduce_fx="max", **options)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=60)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Rows(Logger):
    """What was logged; the `name` and `version` are asked for."""

    name = version = "rows"

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append([step, dict(metrics)])

    def log_hyperparams(self, *args, **kwargs):
        pass


class StopAt(Callback):
    """A signal during this batch, to the last rank only."""

    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_start(self, trainer, *args):
        if trainer.fit_loop.total_batch_idx == self.batch and RANK == WORLD - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def loaders(options):
    """Plain loaders, or those of a dataset without noise that can skip by number."""
    shared = {"batch_size": 4, "num_workers": options["workers"]}
    if not options["sampler"]:
        return DataLoader(Noisy(), shuffle=True, **shared), DataLoader(Noisy(), 5)
    data = Noisy(noisy=False)
    sampler = ResumableSampler(data, WORLD, RANK, seed=5)
    shared |= {"persistent_workers": options["workers"] > 0}
    return DataLoader(data, sampler=sampler, **shared), DataLoader(Noisy(), 5)


def fit(folder, options, *, seed=3, stop=-1, resume=None):
    lightning.seed_everything(seed, workers=True, verbose=False)
    torch.manual_seed(seed + RANK)
    rows = Rows()
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        max_epochs=4,
        accumulate_grad_batches=options["accumulate"],
        val_check_interval=options["interval"],
        gradient_clip_val=1.0,
        logger=rows,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[
            SafeCheckpoints(),
            FiniteLoss(),
            EMA(0.9),
            ModelCheckpoint(folder, filename="best", monitor="val/loss"),
            ModelCheckpoint(folder, filename="last", enable_version_counter=False),
            SaveOnSignal(folder / "last.ckpt"),
            StopAt(stop),
            ExactResume(),
        ],
    )
    code = 0
    try:
        trainer.fit(Net(), *loaders(options), ckpt_path=resume, weights_only=True)
    except StoppedBySignal as error:
        code = error.code
    return rows.rows, code, trainer.fit_loop.total_batch_idx + 1


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def saved(folder):
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    keys = ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers", "global_step")
    return {key: checkpoint[key] for key in keys}


def main():
    fork_apart()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder = Path(sys.argv[1])
    given = (item.split("=") for item in sys.argv[2:])
    options = OPTIONS | {key: type(OPTIONS[key])(value) for key, value in given}
    rows, code, batches = fit(folder / "whole", options)
    assert code == 0
    whole = saved(folder / "whole")
    different = []
    stops = range(0, batches, options["every"])
    for stop in stops:
        here = folder / str(stop)
        before, code, _ = fit(here, options, stop=stop)
        assert code == 143, stop
        after, *_ = fit(here, options, seed=77, resume=str(here / "last.ckpt"))
        if not same(saved(here), whole) or (RANK == 0 and before + after != rows):
            different.append(stop)
    if RANK == 0:
        print(json.dumps({"batches": batches, "stops": len(stops), "different": different}))


if __name__ == "__main__":
    main()
