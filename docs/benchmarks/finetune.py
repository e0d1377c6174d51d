"""Fine-tuning ViT-Tiny/16 at 224 pixels by each method, against training all of it.

    python docs/benchmarks/finetune.py [--pairs 20] [--batch 16] [--images 64] [--epochs 4] [--cpu]

First steps (forward, backward, AdamW, its state made in the step), alternating: the median of the
paired ratios, the ratio of the fastest, and what a step takes at its peak beyond the network.
Memory is measured with freed blocks given back at once (mallopt), so that it is that of tensors.

Then epochs of the head alone in a Trainer, with cached features and without, both modules alike;
the first, which computes the features, stands apart.

With --cpu, both clocks are the processor time of the process, which other work on the machine
hardly changes; with OMP_NUM_THREADS=1.
"""

import argparse
import copy
import ctypes
import logging
import statistics
import time
import warnings
from functools import partial

import torch
from lightning import Callback, Trainer
from measure import alternate, machine, peak_memory, table
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import attnkit
from attnkit.finetune import bitfit, full, head_only, last_blocks, lora, merged
from attnkit.lightning import parameter_groups
from attnkit.tasks.image_classification import ImageClassification

METHODS = {
    "full": full,
    "LoRA, rank 8": partial(lora, rank=8),
    "LoRA, rank 8, MLPs too": partial(lora, rank=8, targets="all"),
    "last 2 blocks": last_blocks,
    "biases": bitfit,
    "head": head_only,
}
MMAP_THRESHOLD = -3  # of mallopt


def step(model, images, labels):
    groups = parameter_groups(model)

    def run():
        optimizer = torch.optim.AdamW(groups, lr=1e-4)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return run


def methods(batch: int, pairs: int, clock) -> None:
    base = attnkit.ViT.from_size("tiny", num_classes=10)
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(10, (batch,))
    models = {name: method(copy.deepcopy(base)) for name, method in METHODS.items()}
    programs = {name: step(model, images, labels) for name, model in models.items()}
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, 2**20)
    memory = {name: peak_memory(program) for name, program in programs.items()}
    libc.mallopt(MMAP_THRESHOLD, 2**25)
    times = alternate(programs, pairs, clock=clock)
    fastest = {name: min(seconds) for name, seconds in times.seconds.items()}
    rows = []
    for name, model in models.items():
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in model.parameters())
        rows.append(
            {
                "trained": name,
                "parameters": f"{trained:,}",
                "share": f"{trained / total:.3%}",
                "median ms": f"{1e3 * times.median(name):.0f}",
                "step / full": f"{times.ratio(name, 'full'):.3f}",
                "fastest ms": f"{1e3 * fastest[name]:.0f}",
                "fastest / full's": f"{fastest[name] / fastest['full']:.3f}",
                "peak MB": f"{memory[name] / 1e6:.0f}",
                "memory / full": f"{memory[name] / memory['full']:.3f}",
            }
        )
    print(table(rows))
    model = models["LoRA, rank 8"].eval()
    with torch.no_grad():
        output = model(images)
        with merged(model):
            print(f"merged and not: {float((model(images) - output).abs().max()):.1e}\n")


class Epochs(Callback):
    """Seconds of each epoch's training."""

    def __init__(self, clock) -> None:
        self.clock, self.seconds = clock, []

    def on_train_epoch_start(self, *_):
        self.start = self.clock()

    def on_train_epoch_end(self, *_):
        self.seconds.append(self.clock() - self.start)


def head(batch: int, images: int, epochs: int, clock) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pictures = torch.randint(0, 256, (images, 3, 224, 224), dtype=torch.uint8)
    data = TensorDataset(pictures, torch.randint(10, (images,)))
    seconds = {}
    for cache in (False, True):
        torch.manual_seed(0)
        module = ImageClassification(
            attnkit.ViT.from_size("tiny", num_classes=10),
            finetune=partial(head_only, cache=cache),
            num_classes=10,
            mean=[0.5] * 3,
            std=[0.5] * 3,
        )
        watch = Epochs(clock)
        trainer = Trainer(
            max_epochs=epochs, logger=False, enable_checkpointing=False, callbacks=[watch],
            accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(data, batch, shuffle=True))
        seconds[cache] = watch.seconds
    plain, cached = (statistics.median(seconds[cache][1:]) for cache in (False, True))
    least = min(seconds[False][1:]) / min(seconds[True][1:])
    print(
        f"the head alone, {images} images, epochs 2 to {epochs}: {plain:.2f} s without the cache, "
        f"{1e3 * cached:.0f} ms with it; the first {seconds[True][0]:.2f} s\n"
        f"{plain / cached:.0f} × faster, the fastest of each {least:.0f} ×"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu else time.perf_counter
    torch.manual_seed(0)
    print(f"ViT-Tiny/16 at 224, batch {arguments.batch}; {machine()}\n")
    methods(arguments.batch, arguments.pairs, clock)
    head(arguments.batch, arguments.images, arguments.epochs, clock)


if __name__ == "__main__":
    main()
