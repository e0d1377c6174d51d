"""CIFAR-10 by the command line, one seed of the experiment."""

import argparse
from collections.abc import Iterator

from gpu_parts.jobs import job


def rows(device: str, arguments: argparse.Namespace) -> Iterator[dict]:
    if not arguments.cifar:
        yield {"CIFAR-10": "needs --cifar FOLDER, with train/CLASS/… and test/CLASS/…"}
        return
    on_cuda = device == "cuda"
    data = [f"data.root={arguments.cifar.resolve()}", f"data.num_workers={12 if on_cuda else 0}"]
    trainer = ["trainer=gpu"] if on_cuda else ["trainer.limit_batches=2", "trainer.max_epochs=1"]
    command = ["task=vit", "experiment=cifar10_vit", "seeds=1", *data, *trainer]
    yield job("CIFAR-10, experiment=cifar10_vit", command, arguments.folder.resolve())
