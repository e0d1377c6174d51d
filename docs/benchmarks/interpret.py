"""What rollout and relevance cost beside a plain forward and backward, at 4,097 tokens.

    python docs/benchmarks/interpret.py [--rounds 3] [rollout relevance legrad …]

One image of 1,024 x 1,024 pixels, patch 16, twelve layers of ViT-B's width: all weights of all
layers would take 9.7 GB. A plain step gives the gradients of the parameters, as training does; the
methods need none of these. Memory is the peak of the process beyond what it held before, in a
process for each program, of its second run.
"""

import argparse
import subprocess
import sys
from functools import partial

import torch
from measure import alternate, machine, peak_memory, table

import attnkit

PLAIN = "forward + backward"


def model_and_images() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = attnkit.ViT.from_size("base", image_size=1024, num_classes=10)
    return model.eval(), torch.randn(1, 3, 1024, 1024)


def plain(model: torch.nn.Module, images: torch.Tensor) -> object:
    y = model(images)[:, 3].sum()
    return torch.autograd.grad(y, list(model.parameters()))


def program(name: str, model: torch.nn.Module, images: torch.Tensor):
    if name == PLAIN:
        return partial(plain, model, images)
    return partial(attnkit.explain, model, images, method=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", default=["rollout", "relevance"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", metavar="PROGRAM", help="print the bytes of one program alone")
    arguments = parser.parse_args()
    if arguments.memory:
        print(peak_memory(program(arguments.memory, *model_and_images())))
        return
    print(machine())
    names = [PLAIN, *arguments.methods]
    peaks = {}
    for name in names:
        command = [sys.executable, __file__, "--memory", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks[name] = int(done.stdout)
    model, images = model_and_images()
    programs = {name: program(name, model, images) for name in names}
    times = alternate(programs, arguments.rounds, warm_up=0)
    rows = [
        {
            "program": name,
            "seconds": f"{times.median(name):.1f}",
            "time over plain": f"{times.ratio(name, PLAIN):.2f} ×",
            "peak MB": f"{peaks[name] / 1e6:,.0f}",
            "MB beyond plain": f"{(peaks[name] - peaks[PLAIN]) / 1e6:+,.0f}",
        }
        for name in names
    ]
    print(table(rows))


if __name__ == "__main__":
    main()
