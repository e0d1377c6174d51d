"""A small real model on real digits, for anyone's Trainer."""

from functools import partial

import lightning
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from attnkit import MultiHeadAttention


class SmallNet(lightning.LightningModule):
    """Sixteen 2 x 2 patches, one attention block, their mean, ten classes."""

    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, 12, 2, stride=2)
        self.attention = MultiHeadAttention(12, num_heads=3, backend=backend)
        self.head = nn.Linear(12, 10)

    def forward(self, images):
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        return self.head((tokens + self.attention(tokens)).mean(1))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self._evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self._evaluate(batch, "test")

    def _evaluate(self, batch, stage):
        logits = self(batch[0])
        self.log(f"{stage}/loss", F.cross_entropy(logits, batch[1]))
        self.log(f"{stage}/accuracy", (logits.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


@pytest.fixture(scope="session")
def small_net() -> type[SmallNet]:
    return SmallNet


@pytest.fixture(scope="session")
def digits() -> TensorDataset:
    """55 digits: five batches of eleven."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images[:55], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(images, torch.tensor(labels[:55]))


@pytest.fixture
def loader(digits) -> DataLoader:
    return DataLoader(digits, batch_size=11)


@pytest.fixture
def make_trainer(tmp_path):
    """A plain Trainer that writes below tmp_path and nothing to the screen."""
    return partial(
        lightning.Trainer,
        accelerator="cpu",
        max_epochs=2,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
