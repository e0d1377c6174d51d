"""The picture of the page in docs/interpret.md: a small ViT learns scenes, a browser opens it.

    python docs/interpret_page.py [FOLDER [docs/interpret_page.png docs/interpret_page_dark.png]]

A scene has a shape and a handwritten digit, and the ViT says which colour the shape has. Two
minutes on one core; the pictures need Chromium and playwright, the page does not.
"""

import shutil
import sys
from pathlib import Path
from random import Random

import numpy as np
import timm
import torch
from timm.optim import Muon
from torch.nn.functional import cross_entropy

import attnkit
from attnkit.interpret.report import Report
from attnkit.lightning import Explained
from attnkit.tasks.images.scenes import COLOURS, SHAPES, draw, draw_scene, handwriting

SHOWN = 8
SIDE = 48
TRAIN, TEST = 0, 2  # parts of the handwriting, and seeds


def draw_scenes(count, part):
    """`count` images between 0 and 1, of a shape beside a digit, and the colours of the shapes."""
    random, digits = Random(part), handwriting(seed=0)[part]
    images, labels = [], []
    while len(images) < count:
        scene = draw_scene(random)
        shapes = [thing for thing in scene["objects"] if thing["kind"] in SHAPES]
        if len(shapes) == 1:
            images.append(draw(scene, SIDE, digits, random).image)
            labels.append(COLOURS.index(shapes[0]["colour"]))
    return torch.tensor(np.stack(images)).float() / 255, torch.tensor(labels)


def learn(images, labels):
    """Three layers of four heads over 64 patches of 6 × 6 pixels."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=SIDE, patch_size=6, depth=3, embed_dim=64,
        num_heads=4, num_classes=len(COLOURS),
    )  # fmt: skip
    steps = [batch for _ in range(10) for batch in torch.randperm(len(images)).split(64)]
    optimizer = Muon(model.parameters(), lr=0.01, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.01, total_steps=len(steps), cycle_momentum=False
    )
    for batch in steps:
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def write(folder):
    model = learn(*draw_scenes(4000, TRAIN))
    images, labels = draw_scenes(500, TEST)
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean()
    explained = Explained(
        model,
        images[:SHOWN],
        pictures=images[:SHOWN],
        truth=labels[:SHOWN],
        class_names=COLOURS,
        names=[f"Scene {number}" for number in range(1, SHOWN + 1)],
    )
    Report(methods=["relevance", "rollout"])(
        explained,
        folder,
        title=f"Where a ViT looks: {SHOWN} scenes",
        facts=[
            f"Model: ViT, 3 layers of 4 heads, 64 patches; {100 * right:.0f} % right",
            "Explained: the predicted colour of the shape",
            f"Images: the first {SHOWN} of {len(images)} test scenes of a shape beside a digit",
            f"Versions: attnkit {attnkit.__version__}, torch {torch.__version__.partition('+')[0]}",
        ],
    )


def take_pictures(source, picture, dark):
    """Take pictures of the last image of the page, in the light and in the dark style."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for scheme, path in (("light", picture), ("dark", dark)):
            page = browser.new_page(viewport={"width": 1000, "height": 800}, color_scheme=scheme)
            page.goto(source.absolute().as_uri())
            section = page.locator(f"#s{SHOWN - 1}")
            frame = section.locator(".frame.main")
            frame.scroll_into_view_if_needed()
            box = frame.bounding_box()
            frame.click(position={"x": 0.44 * box["width"], "y": 0.19 * box["height"]})
            page.wait_for_timeout(300)
            section.evaluate("node => { node.style.padding = '16px'; }")
            section.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "scenes")
    write(folder)
    if len(sys.argv) > 2:
        take_pictures(folder / "explain.html", *map(Path, sys.argv[2:]))
