"""A script for test_two_ranks: all callbacks in a plain Trainer on two gloo processes."""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from attnkit import Interpret, MultiHeadAttention
from attnkit.lightning import (
    EMA,
    KernelRecord,
    LearningCurves,
    ResultsFile,
    TaskModule,
    Throughput,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(1, 12, 2, stride=2)
        self.attention = MultiHeadAttention(12, num_heads=3)
        self.head = nn.Linear(12, 10)

    def forward(self, images):
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        return self.head((tokens + self.attention(tokens)).mean(1))


class Task(TaskModule):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test/loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(53, 1, 8, 8), torch.randint(0, 10, (53,)))
    loader = DataLoader(data, batch_size=7)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=2,
        default_root_dir=sys.argv[1],
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            KernelRecord(),
            Interpret(2, 1, trust="none", layer=-1, folder=f"{sys.argv[1]}/layers"),
            Interpret(num_images=2, every_n_epochs=2),
            Throughput(),
            EMA(),
            LearningCurves(),
            ResultsFile(),
            ModelCheckpoint(sys.argv[1], monitor="val/loss", filename="best"),
        ],
    )
    module = Task(Net())
    trainer.fit(module, loader, loader)
    trainer.test(module, loader, ckpt_path="best", weights_only=True)
