"""The command line on the GPU: each trainer and precision, exact resume."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

AT_ONCE = 5
SHORT = ["trainer.max_epochs=3"]


def jobs(trainer: str, photos: Path) -> dict[str, list[str]]:
    gpu = f"trainer={trainer}"
    return {
        "task=vit": ["task=vit", gpu, *SHORT],
        "task=vit, bf16-mixed": ["task=vit", gpu, "precision=bf16-mixed", *SHORT],
        "task=vit, 16-mixed": ["task=vit", gpu, "precision=16-mixed", *SHORT],
        "task=vit, compile=true": ["task=vit", gpu, "compile=true", *SHORT],
        "task=vit, trainer=fsdp": ["task=vit", "trainer=fsdp", "trainer.devices=1", *SHORT],
        "task=vit, trainer=ddp": ["task=vit", "trainer=ddp", "trainer.devices=1", *SHORT],
        "task=vit, optimizer=muon": ["task=vit", gpu, "optimizer=muon", *SHORT],
        "task=spatial": ["task=spatial", gpu, "trainer.max_epochs=2"],
        "task=spatial, window, bf16": [
            "task=spatial", gpu, "attention=window", "precision=bf16-mixed", "trainer.max_epochs=2",
        ],
        "task=graph": ["task=graph", gpu, "trainer.max_epochs=60"],
        "task=graph, bf16-mixed": [
            "task=graph", gpu, "precision=bf16-mixed", "trainer.max_epochs=60",
        ],
        "task=captioning": ["task=captioning", gpu, "data.num_train=4000", "trainer.max_epochs=2"],
        "task=captioning, compile": [
            "task=captioning", gpu, "data.num_train=2000", "trainer.max_epochs=1", "compile=true",
        ],
        "task=segmentation, bf16-mixed": [
            "task=segmentation", gpu, "precision=bf16-mixed", "data.num_train=2000",
            "trainer.max_epochs=2",
        ],
        "task=segmentation, queries": [
            "task=segmentation", gpu, "decoder=queries", "data.num_train=1000",
            "trainer.max_epochs=1",
        ],
        "task=vit, native sizes": [
            "task=vit", gpu, "data=image_folder", f"data.root={photos}", "data.native=true",
            "data.patch_size=8", "trainer.max_epochs=2",
        ],
        "task=graph, level=graph": ["task=graph", gpu, "level=graph", *SHORT],
        "task=graph, level=link": ["task=graph", gpu, "level=link", "trainer.max_epochs=20"],
        "run=check": ["run=check", "task=vit", gpu],
        "run=bench": ["run=bench", "task=vit", gpu],
    }  # fmt: skip


def rows(device: str, arguments: argparse.Namespace) -> Iterator[dict]:
    trainer, some = ("gpu", slice(None)) if device == "cuda" else ("cpu", slice(1))
    folder = arguments.folder.resolve() / "runs"
    folder.mkdir(exist_ok=True)
    photos = cut_photographs(folder / "photographs")
    every = list(jobs(trainer, photos).items())[some]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(lambda item: job(*item, folder), every)
        modes = [[], ["trainer.deterministic=true"]] if device == "cuda" else []
        yield from pool.map(lambda options: resumed(trainer, options, folder), modes)
    vit = folder / "task=vit"
    yield job("run=test", ["run=test", f"ckpt={vit}", f"trainer={trainer}"], folder)
    yield job("run=explain", ["run=explain", f"ckpt={vit}"], folder)


def cut_photographs(root: Path) -> Path:
    """Pieces of scikit-learn's two photographs, each of another size, as root/<name>/*.png."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    generator = random.Random(0)
    for name, photograph in zip(("china", "flower"), load_sample_images().images, strict=True):
        (root / name).mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(photograph)
        for number in range(60):
            width, height = generator.randint(32, 128), generator.randint(32, 128)
            left = generator.randint(0, picture.width - width)
            top = generator.randint(0, picture.height - height)
            piece = picture.crop((left, top, left + width, top + height))
            piece.save(root / name / f"{number}.png")
    return root


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "attnkit", *options]


def job(name: str, options: list[str], folder: Path) -> dict:
    """The command in a folder of its own, its exit code, and what its results.json says."""
    run_dir = folder / name.replace(", ", "_")
    start = time.monotonic()
    done = subprocess.run(
        [*command(*options), f"run_dir={run_dir}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        cwd=folder,
        env=os.environ | {"ATTNKIT_TRACEBACK": "1"},
    )
    seconds = time.monotonic() - start
    print(name, done.stdout[-3000:], done.stderr[-6000:], flush=True)
    found = {}
    if (results := run_dir / "results.json").exists():
        found = json.loads(results.read_text())
    wanted = ("test/accuracy", "test/loss", "backend/flash_seconds", "train/images_per_second")
    figures = ", ".join(f"{key} {found[key]:.4g}" for key in wanted if key in found)
    errors = (
        [line for line in done.stderr.splitlines() if "rror" in line] if done.returncode else []
    )
    message = errors[0][:300] if errors else ""
    return {
        "job": name,
        "exit code": done.returncode,
        "seconds": f"{seconds:.0f}",
        "results": figures or message or "–",
    }


def resumed(trainer: str, options: list[str], folder: Path) -> dict:
    """A run that is stopped by SIGTERM and goes on, against one that is not stopped."""
    name = "resumed, " + (", ".join(options) or "as it is")
    same = ["task=vit", f"trainer={trainer}", "trainer.max_epochs=6", *options]
    start = time.monotonic()
    whole, stopped = (folder / f"{name}-{which}".replace(", ", "_") for which in ("a", "b"))
    job(whole.name, same, folder)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    with subprocess.Popen([*command(*same), f"run_dir={stopped}"], **quiet) as process:
        while not (stopped / "checkpoints" / "last.ckpt").exists() and process.poll() is None:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGTERM)
    again = subprocess.run([*command(f"resume={stopped}")], **quiet, check=False)
    weights = [
        torch.load(run / "checkpoints" / "last.ckpt", map_location="cpu")["state_dict"]
        for run in (whole, stopped)
    ]
    apart = max((weights[0][k].double() - weights[1][k].double()).abs().max() for k in weights[0])
    return {
        "job": name,
        "exit code": f"{process.returncode}, then {again.returncode}",
        "seconds": f"{time.monotonic() - start:.0f}",
        "results": f"weights at most {apart:.1e} apart",
    }
