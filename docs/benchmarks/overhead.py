"""What it costs that a run can't be lost: the default job's fit against a bare Lightning fit.

    python docs/benchmarks/overhead.py [--rounds 5] [--epochs 10]

Both train the same module on the same digits, with the same steps. Bare is Lightning's Trainer as
it comes: its own ModelCheckpoint, following the same metric, its CSV log and a progress bar. The
other has, beside these, a checkpoint after every epoch, verified checkpoint files, the check of the
loss, the handling of signals and exact resuming. They run in turns, each round beginning with
another; the ratio to reach is 1.05.
"""

import argparse
import functools
import logging
import tempfile
import warnings
from pathlib import Path

import lightning
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from measure import alternate, machine

from attnkit import ViT
from attnkit.lightning import ExactResume, FiniteLoss, SafeCheckpoints, SaveOnSignal
from attnkit.tasks.image_classification import DigitsData, ImageClassification


def fit(epochs: int, *, safe: bool) -> None:
    lightning.seed_everything(0, verbose=False)
    data = DigitsData(augment={"rotate_degrees": 5, "translate": 0.06, "scale": 0.05})
    data.setup("fit")
    facts = data.describe()
    patch_size = facts.pop("patch_size")
    model = ViT(
        image_size=8, patch_size=patch_size, in_channels=1, num_classes=10,
        dim=96, depth=3, num_heads=3, position_std=0.5,
    )  # fmt: skip
    optimizer = functools.partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.05)
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [
            RichProgressBar(),
            ModelCheckpoint(folder, monitor="val/loss", filename="best"),
        ]
        if safe:
            callbacks += [
                SafeCheckpoints(),
                FiniteLoss(),
                ModelCheckpoint(folder, filename="last", enable_version_counter=False),
                SaveOnSignal(Path(folder) / "last.ckpt"),
                ExactResume(),
            ]
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            callbacks=callbacks,
            logger=CSVLogger(folder),
            gradient_clip_val=1.0,
            num_sanity_val_steps=0,
            enable_model_summary=False,
            log_every_n_steps=10,
        )
        trainer.fit(ImageClassification(model, optimizer, **facts), datamodule=data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    programs = {
        "bare": functools.partial(fit, arguments.epochs, safe=False),
        "safe": functools.partial(fit, arguments.epochs, safe=True),
    }
    times = alternate(programs, arguments.rounds, warm_up=1)
    print(machine())
    for name in programs:
        print(f"{name}: {times.median(name):.2f} s for {arguments.epochs} epochs")
    print(f"safe / bare: {times.ratio('safe', 'bare'):.3f} (median of {arguments.rounds} pairs)")


if __name__ == "__main__":
    main()
