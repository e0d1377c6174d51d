"""A user's module in which one rank, or one item of the data, goes wrong; see `unruly`."""

import os
import signal
import time
import warnings

import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from attnkit.lightning import UserError

STEPS = 4


def go_wrong(how):
    if how == "raise":
        warnings.warn("something is odd", stacklevel=1)
        raise RuntimeError("fails on purpose")
    if how == "user":
        raise UserError("settings.txt: wrong on purpose\n  expected something right")
    if how == "file":
        open("/nowhere/to/be/found")  # noqa: SIM115
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(1000)


class Model(LightningModule):
    def __init__(self, how: str | None = None, rank: int = 1, stage: str = "train", lag: float = 0):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(5, 3)

    def _step(self, batch, stage):
        time.sleep(self.hparams.lag)
        if (stage, self.global_rank) == (self.hparams.stage, self.hparams.rank):
            go_wrong(self.hparams.how)
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def training_step(self, batch, index):
        return self._step(batch, "train")

    def validation_step(self, batch, index):
        self._step(batch, "val")

    def test_step(self, batch, index):
        self._step(batch, "test")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Items(Dataset):
    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 13 * STEPS

    def __getitem__(self, number):
        if number == 30:
            go_wrong(self.how)
        return torch.randn(5), number % 3


class Data(LightningDataModule):
    def __init__(self, workers: int = 0, how: str | None = None):
        super().__init__()
        self.workers, self.how = workers, how

    def _loader(self, how=None):
        items = Items(how)
        world, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(items, world, rank, shuffle=False)
        # As many steps whatever the number of ranks.
        return DataLoader(items, 13 // world + 1, sampler=sampler, num_workers=self.workers)

    def train_dataloader(self):
        return self._loader(self.how)

    def val_dataloader(self):
        return self._loader()

    def test_dataloader(self):
        return self._loader()
