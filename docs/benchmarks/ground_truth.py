"""Compares maps of every method with the known evidence, for networks of several seeds.

    python docs/benchmarks/ground_truth.py runs/truth.jsonl [--seeds 5] [--models vit]

Trains a ViT and a residual network with spatial attention on the pictures of `TRUTHS` and asks
every method about test images that are answered right. Each network adds its rows to the file when
it is done, so that a run goes on where it stopped; the tables are printed from the file.

Answered right is: on needle digits the class of the coloured digit, on grids all classes as the
likeliest, with a mark at random the digit, and with one that decides the class of the mark, also of
another mark in its place. A seed of each network takes 2 to 3
minutes of one core's time.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy
from truths import Row, details, kept, overview

import attnkit
from attnkit.interpret import METHODS
from attnkit.interpret.methods.table import methods_of
from attnkit.metrics.maps import area
from attnkit.models import ResNet
from attnkit.tasks.image_classification import (
    DigitGrid,
    ImageClassification,
    NeedleDigits,
    PlantedShortcut,
    attention_network,
)
from attnkit.tasks.image_classification.composed import painted


class Asked(NamedTuple):
    """Images [images, channels, height, width] from 0 to 1, classes and masks [images, …]; the
    side of the places that things are in; and the share of the test that is answered right."""

    images: torch.Tensor
    classes: torch.Tensor
    masks: torch.Tensor
    patch: int
    right: float


def by_label(module, data, truth) -> torch.Tensor:
    return predicted(module, truth.images) == data.sets["test"].labels


def by_classes(module, data, truth) -> torch.Tensor:
    each = truth.classes.shape[1]
    top = module(truth.images).topk(each, dim=1).indices.sort(dim=1).values
    right = (top == truth.classes.sort(dim=1).values).all(dim=1)
    return right & (torch.arange(len(right)) % each == 0)  # each grid is there so many times


def by_mark(module, data, truth) -> torch.Tensor:
    own = truth.classes[:, 0]
    other = (own + torch.randint(1, 10, own.shape)) % 10
    swapped = painted(truth.images, truth.masks[:, 0], other)
    return (predicted(module, truth.images) == own) & (predicted(module, swapped) == other)


class Pictures(NamedTuple):
    """Data of a seed, how long each network learns them, and what is answered right."""

    data: Callable
    epochs: dict[str, int]
    is_right: Callable


TRUTHS = {
    "needle_digits": Pictures(NeedleDigits, {"vit": 12, "spatial": 3}, by_label),
    "digit_grid": Pictures(DigitGrid, {"vit": 6, "spatial": 4}, by_classes),
    "planted_shortcut_1": Pictures(
        partial(PlantedShortcut, strength=1.0), {"vit": 3, "spatial": 2}, by_mark
    ),
    "planted_shortcut_0": Pictures(
        partial(PlantedShortcut, strength=0.0), {"vit": 6, "spatial": 3}, by_label
    ),
}
BATCHES = {"vit": (64, 2e-3), "spatial": (32, 4e-3)}
"""How many pictures each network learns at once, and at which rate."""


@torch.no_grad()
def predicted(module, images: torch.Tensor) -> torch.Tensor:
    return module(images).argmax(dim=1)


def make(name: str, facts: dict) -> torch.nn.Module:
    """Return the ViT of `task=vit`, or a small residual network with attention in its last map."""
    of_images = {key: facts[key] for key in ("image_size", "in_channels", "num_classes")}
    if name == "vit":
        return attnkit.ViT(
            **of_images,
            patch_size=facts["patch_size"],
            dim=96,
            depth=3,
            num_heads=3,
            position_std=0.5,
        )
    backbone = partial(ResNet, num_blocks=1)
    return attention_network(backbone, attnkit.SpatialAttention, where="stages.2", **of_images)


def trained(name: str, data, epochs: int, seed: int) -> ImageClassification:
    torch.manual_seed(seed)
    facts = data.describe()
    known = ("num_classes", "mean", "std", "image_size", "in_channels")
    module = ImageClassification(make(name, facts), **{key: facts[key] for key in known})
    train = data.sets["train"]
    images, labels = module.normalized(train.images), train.labels
    size, rate = BATCHES[name]
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=0.05)
    steps = len(images) // size
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, epochs * steps, pct_start=0.1)
    module.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(size)[:steps]:
            loss = cross_entropy(module.model(images[rows]), labels[rows], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return module.eval()


@torch.no_grad()
def ask(module, data, pictures: Pictures, num_images: int) -> Asked:
    """Test images that are answered right, one for each object in them."""
    truth = data.truth()
    right = pictures.is_right(module, data, truth)
    each = truth.classes.shape[1]
    rows = right.nonzero().flatten()[: -(-num_images // each)]
    return Asked(
        truth.images[rows].repeat_interleave(each, dim=0) / 255,
        # where a mark says nothing, the answer's class is asked about
        predicted(module, truth.images[rows])
        if data.__class__ is PlantedShortcut
        else truth.classes[rows].flatten(),
        truth.masks[rows].flatten(0, 1),
        data.patch,
        float(right.float().mean()) * (each if each > 1 else 1),
    )


def scored(module, asked: Asked, method: str) -> list[Row]:
    """The row of a method; for `centre` also that of the masks themselves."""
    images, classes, masks, patch, right = asked
    places = images.shape[-2] // patch, images.shape[-1] // patch

    def map_of(module, images, classes):
        target = classes if METHODS[method].has_target else None
        options = {}
        if method == "occlusion" and isinstance(module.model, ResNet):  # has no patches of its own
            options["patch"] = patch
        return attnkit.explain(module, images, target, method, **options).map

    known = {"measure": "mass", "chance": float(area(masks).mean()), "right": right}
    known |= {"num": len(images)}
    map = map_of(module, images, classes)
    options = {"removals": ["mean"], "orders": 4, "grid": places, "batch_size": 512}
    trust = attnkit.trust(module, images, classes, map, method=map_of, masks=masks, **options)
    over, pointed, gap = (
        trust[name] for name in ("mass over chance", "pointing", "gap in p, mean colour")
    )
    own = {"class_sensitivity": trust["class sensitivity"].map}
    own |= {"random_weights": trust["similarity, all weights random"].map}
    own |= {"score": over.map * known["chance"], "pointing": pointed.map, "gap": gap.map}
    rows = [{"method": method, **own, **known}]
    if method == "centre":
        own = {"score": over.oracle * known["chance"], "pointing": pointed.oracle}
        own["gap"] = gap.oracle
        rows.append({"method": "oracle", **own, **known})
    return rows


def rows_of(truth: str, name: str, seed: int, num_images: int) -> list[Row]:
    pictures = TRUTHS[truth]
    data = pictures.data(seed=seed)
    data.setup()
    module = trained(name, data, pictures.epochs[name], seed)
    asked = ask(module, data, pictures, num_images)
    print(f"  answered right {asked.right:.3f}, {len(asked.images)} images", flush=True)
    return [row for method in methods_of("patch") for row in scored(module, asked, method)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--images", type=int, default=80)
    parser.add_argument("--models", nargs="*", default=[*BATCHES], choices=[*BATCHES])
    parser.add_argument("--truths", nargs="*", default=[*TRUTHS], choices=[*TRUTHS])
    arguments = parser.parse_args()
    cases = product(arguments.truths, arguments.models)
    of_images = partial(rows_of, num_images=arguments.images)
    rows = kept(arguments.file, arguments.seeds, cases, of_images)
    print(f"{overview(rows)}\n\n{details(rows)}")
