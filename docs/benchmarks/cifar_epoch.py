"""One epoch of the whole job on CIFAR-10 files against a plain PyTorch loop over the same model.

    python docs/benchmarks/cifar_epoch.py FOLDER [--fraction 0.1] [--rounds 3]

FOLDER holds `train/<class>/*.jpg` and `test/<class>/*.jpg`, 60,000 JPEGs of 32 × 32 pixels.

The job is what a user runs: find and decode the files, split, augment, train an epoch of a 6-layer,
192-wide, patch-4 ViT in a Lightning Trainer with checkpoints, a CSV log and attnkit's callbacks,
and validate. The loop has normalized float batches in memory before its clock starts, and does not
augment; it takes the same number of training steps and validation batches. Both run in the same
process, in turns; the ratio to reach is 1.10.
"""

import argparse
import functools
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional

from attnkit import ViT
from attnkit.lightning import KernelRecord, Throughput
from attnkit.tasks.image_classification import ImageClassification, ImageFolderData

BATCH_SIZE = 128
optimizer = functools.partial(torch.optim.AdamW, lr=5e-4, weight_decay=0.05)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return ViT(image_size=32, patch_size=4, num_classes=10, dim=192, depth=6, num_heads=3)


def run_job(root: Path) -> tuple[dict[str, float], ImageFolderData]:
    """Seconds of each part of the job, and its data."""
    start = time.perf_counter()
    data = ImageFolderData(root, batch_size=BATCH_SIZE)
    data.setup("fit")
    facts = data.describe()
    assert (facts["image_size"], facts.pop("patch_size")) == (32, 4)
    read = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [
            ModelCheckpoint(monitor="val/accuracy", mode="max"),
            Throughput(),
            KernelRecord(),
        ]
        trainer = Trainer(
            max_epochs=1,
            callbacks=callbacks,
            logger=CSVLogger(folder),
            default_root_dir=folder,
            accelerator="cpu",
            num_sanity_val_steps=0,
            enable_model_summary=False,
        )
        trainer.fit(ImageClassification(make_model(), optimizer, **facts), datamodule=data)
    end = time.perf_counter()
    return {"read": read - start, "fit": end - read, "total": end - start}, data


def run_loop(data: ImageFolderData) -> dict[str, float]:
    """Seconds of the plain loop over the same images."""
    facts = data.describe()
    mean, std = (torch.tensor(facts[name]).view(3, 1, 1) for name in ("mean", "std"))

    def in_memory(split: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        images = data.sets[split]
        batches = torch.randperm(len(images)).split(BATCH_SIZE)
        pairs = [images.__getitems__(rows.tolist()) for rows in batches]
        return [((pixels / 255 - mean) / std, labels) for pixels, labels in pairs]

    train, val = in_memory("train"), in_memory("val")
    model = make_model().train()
    adamw = optimizer(model.parameters())
    start = time.perf_counter()
    for images, labels in train:
        loss = functional.cross_entropy(model(images), labels)
        adamw.zero_grad()
        loss.backward()
        adamw.step()
    trained = time.perf_counter()
    model.eval()
    with torch.no_grad():
        correct = sum((model(images).argmax(1) == labels).sum().item() for images, labels in val)
    end = time.perf_counter()
    print(f"  loop: val accuracy {correct / len(data.sets['val']):.3f}")
    return {"train": trained - start, "val": end - trained, "total": end - start}


def fraction_of(root: Path, fraction: float, target: Path) -> Path:
    """A tree of links to the first files of every class."""
    for folder in root.glob("*/*"):
        files = sorted(folder.iterdir())
        links = target / folder.relative_to(root)
        links.mkdir(parents=True)
        for file in files[: round(len(files) * fraction)]:
            (links / file.name).symlink_to(file)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fraction", type=float, default=1.0, help="of the images of every class")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.folder.absolute()
        if arguments.fraction < 1:
            root = fraction_of(root, arguments.fraction, Path(folder))
        ratios, strict = [], []
        for number in range(arguments.rounds):
            job, data = run_job(root)
            loop = run_loop(data)
            ratios.append(job["total"] / loop["total"])
            strict.append(job["total"] / loop["train"])
            print(
                f"round {number}: job {job['total']:.1f} s (read {job['read']:.1f}, "
                f"fit {job['fit']:.1f}); loop {loop['total']:.1f} s (train {loop['train']:.1f}, "
                f"val {loop['val']:.1f}); ratio {ratios[-1]:.3f}, "
                f"to the loop's training alone {strict[-1]:.3f}",
                flush=True,
            )
    sizes = ", ".join(f"{len(images)} {split}" for split, images in data.sets.items())
    print(
        f"{sizes}; {arguments.threads} threads; torch {torch.__version__}\n"
        f"median ratio {median(ratios):.3f} (to the loop's training alone {median(strict):.3f})"
    )


if __name__ == "__main__":
    main()
