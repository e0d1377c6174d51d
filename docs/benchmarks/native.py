"""Images of their own sizes in one packed batch against padding, and equal sizes against a tensor.

    python docs/benchmarks/native.py [--rounds 7]

A `ViT` 192 wide with 6 blocks and patches of 16, forward and backward, float32:

- spread: 32 images with sides drawn evenly from 64 to 256 pixels, as a list, against the same
  images as tokens padded to the longest, under a `Padding` mask, with the same positions; logits of
  both are compared first; time, and the peak memory of a step in a process of its own;
- equal: 32 images of 160 × 160 pixels, as a list, against one tensor.

Programs alternate; a ratio is the median of the rounds' ratios.
"""

import argparse
import subprocess
import sys

import torch
from measure import alternate, machine, peak_memory, table
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit import Padding, ViT
from attnkit.layers.patch import embed_patches
from attnkit.models import PackedImages
from attnkit.models.native import positions_on

PATCH = 16


def model_of(side: int) -> ViT:
    torch.manual_seed(0)
    return ViT(image_size=side, patch_size=PATCH, num_classes=10, dim=192, depth=6, num_heads=3)


def spread() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sides = PATCH * torch.randint(4, 17, (32, 2), generator=generator)
    return [torch.randn(3, *size, generator=generator) for size in sides.tolist()]


def padded(model: ViT, images: list[Tensor]) -> Tensor:
    """Logits of the images padded to the longest, as a batch of one tensor."""
    packed = PackedImages.of(images, (PATCH, PATCH))
    counts = [rows * columns for rows, columns in packed.grids]
    patches = nn.utils.rnn.pad_sequence(list(packed.patches.split(counts)), batch_first=True)
    embedded = embed_patches(patches, model.patch_embed.weight, model.patch_embed.bias)
    places = [positions_on(model, grid) for grid in packed.grids]
    tokens = embedded + nn.utils.rnn.pad_sequence(places, batch_first=True)  # type: ignore[arg-type]
    assert model.class_token is not None
    tokens = torch.cat([model.class_token.expand(len(images), -1, -1), tokens], dim=1)
    mask = Padding(torch.tensor(counts) + 1)
    *blocks, last = model.blocks
    for block in blocks:
        tokens = block(tokens, mask=mask)
    return model.head(model.norm(last(tokens, query_tokens=1, mask=mask))[:, 0])


def step(model: ViT, logits: Tensor) -> None:
    F.cross_entropy(logits, torch.arange(len(logits)) % 10).backward()
    model.zero_grad()


def peak_of(name: str) -> float:
    command = [sys.executable, __file__, "--memory", name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", choices=("native", "padded"))
    given = parser.parse_args()
    model, images = model_of(160), spread()
    same = torch.randn(32, 3, 160, 160)
    programs = {
        "native": lambda: step(model, model(images)),
        "padded": lambda: step(model, padded(model, images)),
        "list": lambda: step(model, model(list(same))),
        "tensor": lambda: step(model, model(same)),
    }
    if given.memory:
        print(peak_memory(programs[given.memory]) / 2**20)
        return
    print(machine())
    with torch.no_grad():
        gap = (model(images) - padded(model, images)).abs().max()
    print(f"largest difference of logits, native and padded: {gap:.1e}")
    times = alternate(programs, given.rounds)
    rows = []
    for name, against in (("native", "padded"), ("list", "tensor")):
        rows.append(
            {
                "batch": f"{name} / {against}",
                "ms": f"{1e3 * times.median(name):.0f}",
                "ms, the other": f"{1e3 * times.median(against):.0f}",
                "times faster": f"{times.ratio(against, name):.2f}",
            }
        )
    print(table(rows))
    peaks = {name: peak_of(name) for name in ("native", "padded")}
    share = peaks["native"] / peaks["padded"]
    print(f"peak memory: {peaks['native']:.0f} and {peaks['padded']:.0f} MiB, {share:.2f} of it")


if __name__ == "__main__":
    main()
