"""The picture of the page in docs/interpret.md: a small ViT learns digits, a browser opens it.

    python docs/interpret_page.py [FOLDER [docs/interpret_page.png]]

About a minute on two cores; the picture needs Chromium and playwright, the page does not.
"""

import shutil
import sys
from pathlib import Path

import timm
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import attnkit
from attnkit.interpret.report import Report
from attnkit.lightning import Explained

TRAINED = 1500  # of 1797
SHOWN = 8


def learn(images, labels):
    """Three layers of four heads over 16 patches of 2 × 2 pixels."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, depth=3, embed_dim=48,
        num_heads=4, num_classes=10,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(20):
        for batch in torch.randperm(TRAINED).split(100):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def write(folder):
    digits = load_digits()
    images = torch.tensor(digits.images).float()[:, None] / 16
    labels = torch.tensor(digits.target)
    model = learn(images, labels)
    with torch.no_grad():
        right = (model(images[TRAINED:]).argmax(1) == labels[TRAINED:]).float().mean()
    shown = slice(TRAINED, TRAINED + SHOWN)
    explained = Explained(
        model,
        images[shown],
        pictures=images[shown],
        truth=labels[shown],
        names=[f"Digit {number}" for number in range(shown.start, shown.stop)],
    )
    Report(methods=["relevance", "rollout"])(
        explained,
        folder,
        title="Where a ViT looks: 8 digits",
        facts=[
            f"Model: ViT, 3 layers of 4 heads, 16 patches; {100 * right:.0f} % right",
            "Explained: the predicted class",
            f"Images: the first {SHOWN} of the test set",
            f"Versions: attnkit {attnkit.__version__}, torch {torch.__version__.partition('+')[0]}",
        ],
    )


def take_picture(path, picture):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1100, "height": 800})
        page.goto(path.absolute().as_uri())
        section = page.locator("#s1")
        frame = section.locator(".frame.main")
        frame.scroll_into_view_if_needed()
        box = frame.bounding_box()
        frame.click(position={"x": 0.6 * box["width"], "y": 0.9 * box["height"]})
        page.wait_for_timeout(300)
        section.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "digits")
    write(folder)
    if len(sys.argv) > 2:
        take_picture(folder / "explain.html", Path(sys.argv[2]))
