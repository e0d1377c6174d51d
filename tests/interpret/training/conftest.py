"""A small ViT on real digits, and a plain trainer."""

import lightning
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import attnkit


class Classifier(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


@pytest.fixture
def classifier():
    """A LightningModule around any network."""
    return Classifier


@pytest.fixture
def vit():
    """Makes the same small ViT each time."""

    def made():
        torch.manual_seed(0)
        options = {"dim": 12, "depth": 2, "num_heads": 3, "dropout_p": 0.1, "num_classes": 10}
        return Classifier(attnkit.ViT(image_size=8, patch_size=2, in_channels=1, **options))

    return made


@pytest.fixture(scope="session")
def loader():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images[:55], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return DataLoader(TensorDataset(images, torch.tensor(labels[:55])), batch_size=20)


@pytest.fixture
def trainer(tmp_path):
    def made(callbacks, **options):
        options = {"max_epochs": 3, "logger": False, "enable_checkpointing": False} | options
        return lightning.Trainer(
            accelerator="cpu", default_root_dir=tmp_path, enable_progress_bar=False,
            enable_model_summary=False, callbacks=callbacks, **options,
        )  # fmt: skip

    return made
