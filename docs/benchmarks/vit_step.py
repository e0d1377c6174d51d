"""ViT-Tiny/16 at 224 pixels, forward + backward, against timm's model of the same weights.

    python docs/benchmarks/vit_step.py [--pairs 30] [--batch 16]

Both in one run, alternating, with the same images and weights; the median of the paired ratios,
and the peak memory of a step beyond that of model, gradients and images.
"""

import argparse

import timm
import torch
from measure import alternate, machine, peak_memory, table

from attnkit import interop


def step(model, images, labels):
    def run():
        model.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(images), labels).backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--name", default="vit_tiny_patch16_224", help="timm's name of the model")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    theirs = timm.create_model(arguments.name, num_classes=1000)
    torch.nn.init.trunc_normal_(theirs.head.weight, std=0.02)
    models = {"timm": theirs, "attnkit": interop.from_timm(theirs)}
    images = torch.randn(arguments.batch, 3, *theirs.patch_embed.img_size)
    labels = torch.randint(1000, (arguments.batch,))
    torch.testing.assert_close(models["attnkit"](images), theirs(images), atol=1e-4, rtol=1e-4)
    programs = {name: step(model, images, labels) for name, model in models.items()}
    print(f"{arguments.name}, batch {arguments.batch}, timm {timm.__version__}; {machine()}")
    memory = {name: peak_memory(program) for name, program in programs.items()}
    times = alternate(programs, arguments.pairs)
    rows = [
        {
            "program": name,
            "median ms": f"{1e3 * times.median(name):.0f}",
            "time / timm's": f"{times.ratio(name, 'timm'):.3f}",
            "peak MB": f"{memory[name] / 1e6:.0f}",
            "memory / timm's": f"{memory[name] / memory['timm']:.3f}",
        }
        for name in programs
    ]
    print(table(rows))


if __name__ == "__main__":
    main()
