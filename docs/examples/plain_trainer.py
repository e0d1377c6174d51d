"""Your own LightningModule and a plain Trainer: attnkit's block and callbacks, no Hydra."""

import lightning as L
import torch
import torchvision
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from attnkit import Interpret, MultiHeadAttention
from attnkit.lightning import KernelRecord, LearningCurves, ResultsFile, Throughput


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(*list(torchvision.models.resnet18().children())[:5])
        self.attention = MultiHeadAttention(64, num_heads=4)
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        tokens = self.trunk(images).flatten(2).transpose(1, 2)  # every position is a token
        return self.head((tokens + self.attention(tokens)).mean(1))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits, labels = self(batch[0]), batch[1]
        self.log("val/loss", F.cross_entropy(logits, labels))
        self.log("val/accuracy", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 16
    dataset = TensorDataset(F.interpolate(images, scale_factor=4), torch.tensor(digits.target))
    train, val = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))
    maps = Interpret(every_n_epochs=1, trust="none", layer=-1)  # of the layer, without scores
    callbacks = [KernelRecord(), maps, Throughput(), LearningCurves(), ResultsFile()]
    trainer = L.Trainer(max_epochs=5, callbacks=callbacks, logger=L.pytorch.loggers.CSVLogger("."))
    trainer.fit(Digits(), DataLoader(train, 64, shuffle=True), DataLoader(val, 256))
