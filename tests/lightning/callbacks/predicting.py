"""A script for test_results: predictions of one or two processes, a folder for each case."""

import os
import sys
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader, Dataset

from attnkit.lightning import PredictionsFile
from attnkit.lightning.resume.sampler import UnpaddedSampler


class Numbers(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return torch.tensor(1.0 + number)


class Squares(lightning.LightningModule):
    """The square of each number, without the numbers that `left_out` divides."""

    def __init__(self, left_out):
        super().__init__()
        self.left_out = left_out

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        kept = batch[batch % self.left_out != 0]
        return {
            "number": kept.int(),
            "square": kept**2,
            "best": [[("a", x)] for x in kept.tolist()],
        }


class Whole:
    """No DataLoader: every process sees all of it."""

    def __iter__(self):
        yield torch.arange(1.0, 4.0)

    def __len__(self):
        return 1


class Mine(lightning.LightningDataModule):
    """As PredictData: each process reads a part in one piece, or nothing."""

    def __init__(self, count):
        super().__init__()
        self.count = count
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def predict_dataloader(self):
        numbers = Numbers(self.count)
        sampler = UnpaddedSampler(numbers, self.trainer.world_size, self.trainer.global_rank)
        return DataLoader(numbers, batch_size=2, sampler=sampler)


def predict(folder, devices, data, left_out=5):
    writer = PredictionsFile()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        callbacks=[writer],
    )
    trainer.predict(Squares(left_out), data, return_predictions=False)
    said = f"{Path(folder).name} rank {trainer.global_rank}: {writer.num_rows} rows\n"
    os.write(1, said.encode())  # in one piece, as the other rank speaks too


if __name__ == "__main__":
    folder, devices = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    predict(folder / "plain", devices, DataLoader(Numbers(13), batch_size=3), left_out=99)
    predict(folder / "parts", devices, Mine(13))
    predict(folder / "one", devices, Mine(2))
    predict(folder / "none", devices, Mine(1), left_out=1)
    predict(folder / "whole", devices, Whole())
    predict(
        folder / "two",
        devices,
        [DataLoader(Numbers(4), batch_size=3), Whole(), DataLoader(Numbers(3), batch_size=2)],
        left_out=99,
    )
