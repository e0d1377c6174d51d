"""Two processes (gloo) and one: the same metrics, though the data does not divide evenly."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning import Trainer, seed_everything
from torch import nn

from attnkit.tasks.image_classification import DigitsData, ImageClassification

BATCH = 89  # of the 179 digits in val, one process gets two batches and the other one


def run(devices, folder):
    """Evaluate fixed weights, in this process or as one of two."""
    seed_everything(1, verbose=False)
    data = DigitsData(seed=2, batch_size=BATCH, augment=None)
    data.setup("fit")
    facts = data.describe()
    del facts["patch_size"]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    task = ImageClassification(model, functools.partial(torch.optim.SGD, lr=0.0), **facts)
    trainer = Trainer(
        max_epochs=1,
        limit_train_batches=1,  # of weights that stay as they are
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
    )
    trainer.fit(task, datamodule=data)
    metrics = dict(trainer.callback_metrics)
    trainer.test(task, datamodule=data, verbose=False)
    metrics.update(trainer.callback_metrics)
    result = {
        "metrics": {name: value.item() for name, value in metrics.items()},
        "confusion": task.confusion.tolist(),
        "sizes": {split: len(images) for split, images in data.sets.items()},
    }
    if trainer.is_global_zero:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    return result


@pytest.mark.slow
def test_metrics_of_two_processes_are_those_of_one(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads((tmp_path / "result.json").read_text())
    one = run(1, tmp_path)
    val, test = one["sizes"]["val"], one["sizes"]["test"]
    assert test % 2 == 1, "the images must not divide evenly"
    assert (val - val // 2, val // 2) == (BATCH + 1, BATCH), "nor the number of batches"
    assert sum(map(sum, two["confusion"])) == test  # nothing counted twice
    assert two["confusion"] == one["confusion"]
    evaluated = [name for name in one["metrics"] if not name.startswith("train")]
    assert len(evaluated) == 10
    for name in evaluated:
        assert two["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-6)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(2, sys.argv[1])
