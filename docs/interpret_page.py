"""The picture of the page in docs/interpret.md: a small ViT learns scenes, a browser opens it.

    python docs/interpret_page.py [FOLDER [docs/interpret_page.png docs/interpret_page_dark.png]]

A scene has one shape and one handwritten digit, and the ViT says which shape it is. Two minutes on
one core; the picture needs Chromium and playwright, the page does not.
"""

import shutil
import sys
from pathlib import Path

import timm
import torch
from torch.nn.functional import cross_entropy

import attnkit
from attnkit.interpret.report import Report
from attnkit.lightning import Explained
from attnkit.tasks.segmentation import SceneMasksData

SHOWN = 8
SIDE = 48


def of_one_shape(scenes):
    """Images between 0 and 1, and the shape's number, of scenes of a shape beside a digit."""
    seen = torch.stack([(scenes.masks == n).flatten(1).any(1) for n in range(1, 9)], dim=1)
    chosen = (seen[:, :7].sum(1) == 1) & seen[:, 7]
    return scenes.images[chosen].float() / 255, seen[chosen, :7].int().argmax(1)


def learn(images, labels):
    """Four layers of four heads over 64 patches of 6 × 6 pixels."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=SIDE, patch_size=6, depth=4, embed_dim=64,
        num_heads=4, num_classes=7,
    )  # fmt: skip
    steps = [batch for _ in range(20) for batch in torch.randperm(len(images)).split(64)]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=len(steps))
    for batch in steps:
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def write(folder):
    sets, names = SceneMasksData(num_test=1000, image_size=SIDE).load()
    model = learn(*of_one_shape(sets["train"]))
    images, labels = of_one_shape(sets["test"])
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean()
    explained = Explained(
        model,
        images[:SHOWN],
        pictures=images[:SHOWN],
        truth=labels[:SHOWN],
        class_names=names[1:8],
        names=[f"Scene {number}" for number in range(1, SHOWN + 1)],
    )
    Report(methods=["relevance", "rollout"])(
        explained,
        folder,
        title=f"Where a ViT looks: {SHOWN} scenes",
        facts=[
            f"Model: ViT, 4 layers of 4 heads, 64 patches; {100 * right:.0f} % right",
            "Explained: the predicted shape",
            f"Images: the first {SHOWN} of {len(images)} test scenes of a shape beside a digit",
            f"Versions: attnkit {attnkit.__version__}, torch {torch.__version__.partition('+')[0]}",
        ],
    )


def take_pictures(source, picture, dark):
    """Of the first image of the page, in its light and in its dark style."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for scheme, path in (("light", picture), ("dark", dark)):
            page = browser.new_page(viewport={"width": 1000, "height": 800}, color_scheme=scheme)
            page.goto(source.absolute().as_uri())
            section = page.locator("#s1")
            frame = section.locator(".frame.main")
            frame.scroll_into_view_if_needed()
            box = frame.bounding_box()
            frame.click(position={"x": 0.6 * box["width"], "y": 0.9 * box["height"]})
            page.wait_for_timeout(300)
            section.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "scenes")
    write(folder)
    if len(sys.argv) > 2:
        take_pictures(folder / "explain.html", *map(Path, sys.argv[2:]))
