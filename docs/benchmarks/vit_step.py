"""A training step of ViT-Tiny/16 at 224 pixels, batch 16, against timm's, in turns.

    python docs/benchmarks/vit_step.py [--rounds 30] [--size tiny] [--batch-size 16]

Forward, cross-entropy and backward in float32 on the CPU, both models with the same weights. The
time is the median over the rounds of the ratio of the two, each round beginning with the other
one. The peak memory is the kernel's count of resident memory over that before the step, gradients
included, each model in a process of its own; several processes are started and the median taken.

With class-token pooling ours computes, in the last block, the query, output and MLP of the class
token alone. That is exact: the script prints how far logits and gradients lie apart.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from statistics import median

import timm
import torch
from measure import alternate, machine, peak_memory, table
from torch import Tensor, nn
from torch.nn import functional

from attnkit import interop

NAMES = ("attnkit", "timm")


def make_models(size: str) -> dict[str, nn.Module]:
    """timm's model and ours with its weights, both in training mode."""
    torch.manual_seed(0)
    theirs = timm.create_model(f"vit_{size}_patch16_224").train()
    return {"attnkit": interop.from_timm(theirs), "timm": theirs}


def make_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        functional.cross_entropy(model(images), labels).backward()

    return step


def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, 224, 224, generator=generator)
    return images, torch.randint(1000, (batch_size,), generator=generator)


def print_distance(models: dict[str, nn.Module], images: Tensor, labels: Tensor) -> None:
    for model in models.values():
        make_step(model, images, labels)()
    with torch.no_grad():
        logits = [models[name](images) for name in NAMES]
    gradients = [
        models["attnkit"].blocks[0].attention.in_proj.weight.grad,
        models["timm"].blocks[0].attn.qkv.weight.grad,
    ]
    for what, (ours, theirs) in {"logits": logits, "first gradients": gradients}.items():
        print(f"{what}: {(ours - theirs).norm() / theirs.norm():.1e} apart, relative")


def peak_in_own_process(name: str, options: argparse.Namespace) -> int:
    command = [sys.executable, __file__, "--size", options.size, "--peak-of", name]
    command += ["--batch-size", str(options.batch_size)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--processes", type=int, default=3, help="for the memory, of each model")
    parser.add_argument("--peak-of", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    batch = make_batch(options.batch_size)
    models = make_models(options.size)

    if options.peak_of:
        model = models.pop(options.peak_of)
        models.clear()
        print(peak_memory(make_step(model, *batch)))
        return

    print(f"{machine()}, timm {timm.__version__}\n")
    print_distance(models, *batch)
    times = alternate({name: make_step(models[name], *batch) for name in NAMES}, options.rounds)
    peaks = {
        name: median(peak_in_own_process(name, options) for _ in range(options.processes))
        for name in NAMES
    }
    rows = [
        {
            "model": name,
            "step, median": f"{1e3 * times.median(name):.0f} ms",
            "time / timm's": f"{times.ratio(name, 'timm'):.3f}",
            "peak memory": f"{peaks[name] / 2**20:.0f} MiB",
            "memory / timm's": f"{peaks[name] / peaks['timm']:.3f}",
        }
        for name in NAMES
    ]
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
