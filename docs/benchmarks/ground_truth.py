"""Whether maps are where the evidence is known to be: every method, networks of several seeds.

    python docs/benchmarks/ground_truth.py runs/truth.jsonl [--seeds 5] [--models vit]

Trains a ViT and a residual network with spatial attention on the pictures of `TRUTHS` and asks
every method about test images that are answered right. Each network adds its rows to the file when
it is done, so that a run goes on where it stopped; the table is printed from the file. Captioners
are trained before, and their nouns and colours asked about on the scenes:

    for seed in 0 1 2 3 4; do
        python -m attnkit task=captioning seed=$seed run_dir=runs/words_$seed
        python -m attnkit run=export ckpt=runs/words_$seed export.folder=runs/words_$seed/export
    done
    python docs/benchmarks/ground_truth.py runs/truth.jsonl --captioners runs/words_*

Answered right is: on needle digits the class of the coloured digit, on grids all classes as the
likeliest, with a mark at random the digit, and with one that decides the class of the mark, also of
another mark in its place. A seed of the ViT takes 4 minutes on one
core, of the residual network 15.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import torch
from measure import table
from torch.nn.functional import cross_entropy

import attnkit
from attnkit.metrics.localisation import area, mass, pointing
from attnkit.models import ResNet
from attnkit.sight import METHODS
from attnkit.sight.captions import METHODS as CAPTION_METHODS
from attnkit.tasks.captioning import ScenesData
from attnkit.tasks.image_classification import (
    DigitGrid,
    ImageClassification,
    NeedleDigits,
    PlantedShortcut,
    attention_network,
)
from attnkit.tasks.image_classification.planted_shortcut import painted


class Asked(NamedTuple):
    """Images [images, channels, height, width] from 0 to 1, classes and masks [images, …]."""

    images: torch.Tensor
    classes: torch.Tensor
    masks: torch.Tensor
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
    "needle_digits": Pictures(NeedleDigits, {"vit": 12, "spatial": 6}, by_label),
    "digit_grid": Pictures(DigitGrid, {"vit": 6, "spatial": 3}, by_classes),
    "planted_shortcut_1": Pictures(
        partial(PlantedShortcut, strength=1.0), {"vit": 3, "spatial": 2}, by_mark
    ),
    "planted_shortcut_0": Pictures(
        partial(PlantedShortcut, strength=0.0), {"vit": 6, "spatial": 4}, by_label
    ),
}
MODELS = ("vit", "spatial")
SCENES = "scenes"


@torch.no_grad()
def predicted(module, images: torch.Tensor) -> torch.Tensor:
    return module(images).argmax(dim=1)


def make(name: str, facts: dict) -> torch.nn.Module:
    """What `task=vit` and `task=spatial` make."""
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
    backbone = partial(ResNet, num_blocks=2, widths=[16, 32, 64])
    return attention_network(backbone, attnkit.SpatialAttention, **of_images)


def trained(name: str, data, epochs: int, seed: int) -> ImageClassification:
    torch.manual_seed(seed)
    facts = data.describe()
    known = ("num_classes", "mean", "std", "image_size", "in_channels")
    module = ImageClassification(make(name, facts), **{key: facts[key] for key in known})
    train = data.sets["train"]
    images, labels = module.normalized(train.images), train.labels
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3, weight_decay=0.05)
    steps = epochs * (len(images) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    module.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(64)[: len(images) // 64]:
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
        float(right.float().mean()) * (each if each > 1 else 1),
    )


def scored(module, asked: Asked, method: str) -> list[dict]:
    """The row of a method; for `centre` also that of the masks themselves."""
    images, classes, masks, right = asked

    def map_of(module, images, classes):
        target = classes if METHODS[method].has_target else None
        return attnkit.explain(module, images, target, method).map

    known = {"measure": "mass", "chance": float(area(masks).mean()), "right": right}
    known |= {"num": len(images)}
    try:
        map = map_of(module, images, classes)
    except ValueError as error:  # attention within windows, or of maps of several sizes
        refused = str(error).partition(";")[0]
        return [{"method": method, "score": None, "refused": refused, **known}]
    options = {"removals": ["mean"], "orders": 4, "batch_size": 512}
    trust = attnkit.trust(module, images, classes, map, method=map_of, masks=masks, **options)
    over, pointed, gap = (
        trust[name] for name in ("mass over chance", "pointing", "gap in p, mean colour")
    )
    known |= {"centre": over.centre * known["chance"], "oracle": over.oracle * known["chance"]}
    own = {"within": gap.within, "class_sensitivity": trust["class sensitivity"].map}
    own |= {"random_weights": trust["similarity, all weights random"].map}
    own |= {"score": over.map * known["chance"], "pointing": pointed.map, "gap": gap.map}
    rows = [{"method": method, **own, **known}]
    if method == "centre":
        own = {"score": known["oracle"], "pointing": pointed.oracle, "gap": gap.oracle}
        rows.append({"method": "oracle", **own, **known})
    return rows


def rows_of(truth: str, name: str, seed: int, num_images: int) -> list[dict]:
    pictures = TRUTHS[truth]
    data = pictures.data(seed=seed)
    data.setup()
    module = trained(name, data, pictures.epochs[name], seed)
    asked = ask(module, data, pictures, num_images)
    print(f"  answered right {asked.right:.3f}, {len(asked.images)} images", flush=True)
    return [row for method in METHODS for row in scored(module, asked, method)]


def caption_rows(run: str, num_images: int) -> list[dict]:
    """Nouns and colours of the sentences that a captioner says, where they name what is there."""
    module = attnkit.load(run)
    data = ScenesData(num_train=100, num_val=1)
    data.setup()
    truth = data.truth()
    images = truth.images[:num_images]
    with torch.no_grad():
        said = module.model.generate(module.normalized(images)).words
    sentences = [data_words(module, row) for row in said]
    places = [
        (image, word, number)
        for image, sentence in enumerate(sentences)
        for word, number in truth.objects_of(image, sentence)
    ]
    image, word, number = torch.tensor(places).T
    masks = truth.masks[image, number]
    normalized = module.normalized(images)
    rows = []
    shared = {"measure": "mass", "chance": float(area(masks).mean()), "num": len(places)}
    shared["right"] = len(set(image.tolist())) / len(images)
    for method in (*CAPTION_METHODS, "oracle"):
        if method == "oracle":
            maps = masks.float()
        else:
            maps = torch.cat(
                [
                    attnkit.explain(module.model, part, words, method).words
                    for part, words in zip(normalized.split(50), said.split(50), strict=True)
                ]
            )[image, word]
            grid = maps.shape[1:]
        if method == "oracle":
            maps = torch.nn.functional.adaptive_avg_pool2d(maps[:, None], grid)[:, 0]
        found = {"score": float(mass(maps, masks).mean())}
        rows.append(
            {"method": method, **found, "pointing": float(pointing(maps, masks).mean()), **shared}
        )
    by = {row["method"]: row["score"] for row in rows}
    return [{**row, "centre": by["centre"], "oracle": by["oracle"]} for row in rows]


def data_words(module, words: torch.Tensor) -> str:
    return module.tokenizer.decode(words.tolist())


COLUMNS = {
    "mass over chance": lambda row: row["score"] / row["chance"],
    "pointing": lambda row: row.get("pointing"),
    "gap, mean colour": lambda row: row.get("gap"),
    "class sensitivity": lambda row: row.get("class_sensitivity"),
    "random weights": lambda row: row.get("random_weights"),
}


def overview(rows: list[dict]) -> str:
    """Mass over chance: a row for each method, a column for each truth and network."""
    rows = [row for row in rows if row["measure"] == "mass"]
    cases = [*dict.fromkeys((row["truth"], row["model"]) for row in rows)]
    lines = []
    for method in (*METHODS, "oracle"):
        line = {"map": f"`{method}`"}
        for truth, name in cases:
            asked = (truth, name, method)
            some = [row for row in rows if (row["truth"], row["model"], row["method"]) == asked]
            known = [row["score"] / row["chance"] for row in some if row["score"] is not None]
            line[f"{truth}, {name}"] = spread(known)
        lines.append(line)
    return table(lines)


def shown(rows: list[dict]) -> str:
    """A table for each truth and network, the methods with the most mass first."""
    parts = []
    for truth, name in dict.fromkeys((row["truth"], row["model"]) for row in rows):
        some = [row for row in rows if (row["truth"], row["model"]) == (truth, name)]
        if some[0]["measure"] != "mass":
            continue
        of = {method: [r for r in some if r["method"] == method] for method in METHODS}
        of["oracle"] = [r for r in some if r["method"] == "oracle"]
        seeds = len({row["seed"] for row in some})
        chance, right = (mean(row[key] for row in some) for key in ("chance", "right"))
        known = sorted(
            (part for part in of.values() if part and part[0]["score"] is not None),
            key=lambda part: -mean(row["score"] for row in part),
        )
        refused = [method for method, part in of.items() if part and part[0]["score"] is None]
        lines = [
            {"map": f"`{part[0]['method']}`"}
            | {column: spread([value(row) for row in part]) for column, value in COLUMNS.items()}
            for part in known
        ]
        number = mean(row["num"] for row in some)
        head = f"**{truth}, {name}**: {seeds} seeds, {100 * right:.0f} % answered right, "
        head += f"{number:.0f} scored, chance {chance:.3f}"
        if refused:
            head += f"; not available: {', '.join(refused)}"
        parts.append(f"{head}\n\n{table(lines)}")
    return "\n\n".join(parts)


def spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return f"{mean(known):.2f}" + (f" ± {stdev(known):.2f}" if len(known) > 1 else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--images", type=int, default=80)
    parser.add_argument("--models", nargs="*", default=[*MODELS, "captioner"])
    parser.add_argument("--truths", nargs="*", default=[*TRUTHS, SCENES])
    parser.add_argument("--captioners", nargs="*", default=[], help="run folders, of seeds 0, 1, …")
    arguments = parser.parse_args()
    file = arguments.file
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(row["truth"], row["model"], row["seed"]) for row in rows}
    jobs = [
        (truth, name, seed) for seed, truth, name in product(range(arguments.seeds), TRUTHS, MODELS)
    ]
    jobs += [(SCENES, "captioner", seed) for seed in range(len(arguments.captioners))]
    for truth, name, seed in jobs:
        if truth not in arguments.truths or name not in arguments.models:
            continue
        if (truth, name, seed) in done:
            continue
        print(f"{truth}, {name}, seed {seed}", flush=True)
        if truth == SCENES:
            found = caption_rows(arguments.captioners[seed], arguments.images)
        else:
            found = rows_of(truth, name, seed, arguments.images)
        found = [{"truth": truth, "model": name, "seed": seed, **row} for row in found]
        with file.open("a") as out:
            out.writelines(json.dumps(row) + "\n" for row in found)
        rows += found
    print(f"mass over chance\n\n{overview(rows)}\n\n{shown(rows)}")
