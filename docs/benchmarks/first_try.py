"""How good the default settings are on image folders that were never named, at equal time.

    python docs/benchmarks/first_try.py [--minutes 5] [--sets digits shapes] [--settings 12]

Five sets are drawn and written as files: small grey, small colour and large pictures, few and many,
even and uneven classes. Each is learned with the defaults of `task=vit`, with settings by hand, and
with `task=spatial attention=se`, `trainer.minutes` each; the table has the accuracy on test files,
the mean over the classes. The first --settings of the list by hand are tried.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from sklearn.datasets import load_digits, load_sample_image

Picture = tuple[str, str, Image.Image]  # split, class, pixels
SETTINGS = {
    "defaults": (),
    "spatial, se": ("task=spatial", "attention=se"),
    "no augmentation": ("data.augment=null",),
    "flips, half-area crops": (
        "data.augment.horizontal_flip=0.5",
        "data.augment.crop_min_area=0.5",
    ),
    "width 192": ("model.dim=192",),
    "8 patches a side": ("model.patch_size=BY8",),
    "14 patches a side": ("model.patch_size=BY14",),
    "learning rate doubled": ("optimizer.lr=0.004",),
    "learning rate halved": ("optimizer.lr=0.001",),
    "batches of 32": ("data.batch_size=32",),
    "6 layers": ("model.depth=6",),
    "no label smoothing": ("module.label_smoothing=0",),
    "mean pooling": ("model.pooling=mean",),
    "RandAugment": ("+data.augment.policy=randaugment",),
}


def digits() -> Iterator[Picture]:
    """6,000 grey pictures of 28 pixels: scikit-learn's digits, enlarged and shifted."""
    found, rng = load_digits(), np.random.default_rng(0)
    order = rng.permutation(len(found.images))
    for split, rows, count in (("train", order[400:], 6000), ("test", order[:400], 1200)):
        for number in range(count):
            row = rows[number % len(rows)]
            pixels = Image.fromarray((found.images[row] * 255 / 16).astype(np.uint8))
            picture = Image.new("L", (28, 28))
            place = rng.integers(0, 5, 2)
            picture.paste(pixels.resize((24, 24), Image.Resampling.BICUBIC), tuple(place.tolist()))
            yield split, str(found.target[row]), picture


def shapes() -> Iterator[Picture]:
    """2,400 colour pictures of 64 pixels: six shapes of any colour, place and size."""
    rng = np.random.default_rng(1)
    for number in range(2400 + 1200):
        kind = number % 6
        background = rng.normal(rng.uniform(60, 190, 3), 25, (64, 64, 3)).clip(0, 255)
        picture = Image.fromarray(background.astype(np.uint8))
        draw = ImageDraw.Draw(picture)
        colour = tuple(rng.integers(0, 256, 3).tolist())
        r = rng.uniform(9, 18)
        x, y = rng.uniform(r, 64 - r, 2)
        box = (x - r, y - r, x + r, y + r)
        if kind == 0:
            draw.ellipse(box, fill=colour)
        elif kind == 1:
            draw.ellipse(box, outline=colour, width=4)
        elif kind == 2:
            draw.rectangle(box, fill=colour)
        elif kind == 3:
            draw.regular_polygon((x, y, r), 3, rotation=int(rng.integers(360)), fill=colour)
        elif kind == 4:
            draw.line((x - r, y - r, x + r, y + r), fill=colour, width=5)
            draw.line((x - r, y + r, x + r, y - r), fill=colour, width=5)
        else:
            draw.regular_polygon((x, y, r), 5, rotation=int(rng.integers(360)), fill=colour)
        yield "train" if number < 2400 else "test", f"shape{kind}", picture


def arrows() -> Iterator[Picture]:
    """1,230 uneven colour pictures of 32 pixels: where an arrow points; a mirror changes it."""
    rng = np.random.default_rng(2)
    counts = {"left": 600, "right": 300, "up": 200, "down": 130}
    for split in ("train", "test"):
        for turn, (name, count) in enumerate(counts.items()):
            for _ in range(count if split == "train" else 200):
                pixels = rng.normal(rng.uniform(70, 180, 3), 20, (32, 32, 3)).clip(0, 255)
                picture = Image.fromarray(pixels.astype(np.uint8))
                draw = ImageDraw.Draw(picture)
                colour = tuple(rng.integers(0, 256, 3).tolist())
                draw.line((4, 16, 28, 16), fill=colour, width=3)
                draw.polygon([(3, 16), (12, 8), (12, 24)], fill=colour)
                angle = {0: 0, 1: 180, 2: 270, 3: 90}[turn] + int(rng.integers(-12, 13))
                yield split, name, picture.rotate(angle, fillcolor=picture.getpixel((0, 0)))


def textures() -> Iterator[Picture]:
    """320 grey pictures of 96 pixels: gratings, checks, dots and noise of two scales each."""
    rng = np.random.default_rng(3)
    rows, columns = np.mgrid[:96, :96]
    for number in range(320 + 960):
        kind, scale = number % 4, (5, 9)[number // 4 % 2] * rng.uniform(0.9, 1.1)
        angle, phase = rng.uniform(0, np.pi), rng.uniform(0, 2 * np.pi, 2)
        u = rows * np.cos(angle) + columns * np.sin(angle)
        v = columns * np.cos(angle) - rows * np.sin(angle)
        a, b = np.sin(2 * np.pi * u / scale + phase[0]), np.sin(2 * np.pi * v / scale + phase[1])
        coarse = rng.normal(size=(int(192 / scale), int(192 / scale)))
        noise = np.asarray(Image.fromarray(coarse.astype(np.float32)).resize((96, 96)))
        pattern = (a, np.sign(a * b), np.maximum(a, 0) * np.maximum(b, 0) * 2 - 1, noise)[kind]
        pixels = 128 + rng.uniform(30, 70) * pattern + rng.normal(0, 25, (96, 96))
        picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        split = "train" if number < 320 else "test"
        yield split, f"kind{kind}_{number // 4 % 2}", picture


def photographs() -> Iterator[Picture]:
    """600 uneven colour pictures of 224 pixels: parts of two photographs, the test of another half,
    and of both in other colours."""
    rng = np.random.default_rng(4)
    for name, count in (
        ("china", 300),
        ("flower", 200),
        ("china_swapped", 60),
        ("flower_swapped", 40),
    ):
        whole = load_sample_image(f"{name.partition('_')[0]}.jpg")
        whole = whole[..., [2, 0, 1]] if name.endswith("swapped") else whole
        half = whole.shape[1] // 2
        for split, part, number in (
            ("train", whole[:, :half], count),
            ("test", whole[:, half:], 200),
        ):
            for _ in range(number):
                side = int(rng.integers(90, 224))
                top = int(rng.integers(0, part.shape[0] - side))
                left = int(rng.integers(0, part.shape[1] - side))
                cut = Image.fromarray(part[top : top + side, left : left + side])
                yield split, name, cut.resize((224, 224), Image.Resampling.BICUBIC)


SETS = {"digits": digits, "shapes": shapes, "arrows": arrows, "textures": textures,
        "photographs": photographs}  # fmt: skip
SIDES = {"digits": 28, "shapes": 64, "arrows": 32, "textures": 96, "photographs": 224}


def write(root: Path, pictures: Iterator[Picture]) -> None:
    for number, (split, name, picture) in enumerate(pictures):
        folder = root / split / name
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / f"{number:05d}.png")


def patch_of(side: int, grid: int) -> int:
    """The divisor of the side that gives the number of patches a side nearest to `grid`."""
    divisors = [patch for patch in range(2, side) if side % patch == 0]
    return min(divisors, key=lambda patch: abs(side // patch - grid))


def accuracy(root: Path, words: tuple[str, ...], minutes: float, side: int, run: Path) -> float:
    """The balanced accuracy on the test files; NaN where the run fails."""
    named = {"BY8": str(patch_of(side, 8)), "BY14": str(patch_of(side, 14))}
    words = tuple(
        word.replace("BY8", named["BY8"]).replace("BY14", named["BY14"]) for word in words
    )
    task = () if any(word.startswith("task=") for word in words) else ("task=vit",)
    command = [sys.executable, "-m", "attnkit", *task, *words, "data=image_folder"]
    command += [f"data.root={root}", f"trainer.minutes={minutes}", f"run_dir={run}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-400:], done.stderr[-400:], file=sys.stderr)
        return float("nan")
    return json.loads((run / "results.json").read_text())["test/balanced_accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="of each training")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--settings", type=int, default=12, help="by hand, the first of the list")
    options = parser.parse_args()
    chosen = list(SETTINGS.items())[: 2 + options.settings]
    with tempfile.TemporaryDirectory() as folder:
        for name in options.sets:
            root = Path(folder, name)
            write(root, SETS[name]())
            found = {}
            for number, (setting, words) in enumerate(chosen):
                run = Path(folder, "runs", name, str(number))
                found[setting] = accuracy(root, words, options.minutes, SIDES[name], run)
                print(f"{name:12} {setting:24} {found[setting]:.1%}", flush=True)
            best = max(value for setting, value in found.items() if setting != "spatial, se")
            behind, conv = best - found["defaults"], found["spatial, se"] - found["defaults"]
            print(f"{name:12} defaults are {100 * behind:.1f} points behind the best by hand, "
                  f"{100 * conv:+.1f} points from task=spatial", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
