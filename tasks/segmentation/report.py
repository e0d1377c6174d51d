"""Callback that writes the results of tests and predictions: tables, pictures and masks."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningModule, Trainer
from PIL import Image, ImageDraw
from torch import Tensor

from attnkit.core.arguments import at_least
from attnkit.lightning import ClassReport
from attnkit.lightning.console import in_picture
from attnkit.lightning.files import replacing
from attnkit.tasks.segmentation.data import IGNORED

_HIGH = 160  # minimum height in pixels of a row of examples
_LINE = 14


class SegmentationReport(ClassReport):
    """Writes the tables of `ClassReport`, with the IoU of each class, and pictures.

    A test writes `examples.png`: images, truth and prediction side by side. A prediction writes
    `masks/<path>.png`, the class number of each pixel as an indexed PNG with a palette, and
    `overlays/<path>.png`, these colours over the picture.

    Args:
        folder: the folder of the files; it is created if it does not exist.
        num_examples: how many images of the test, from the first, are drawn; 0: none.
        opacity: opacity of the colours of an overlay, from 0 to 1.
    """

    def __init__(self, folder: str | Path, *, num_examples: int = 8, opacity: float = 0.5) -> None:
        super().__init__(folder)
        at_least(0, num_examples=num_examples)
        if not 0 <= opacity <= 1:
            raise ValueError(f"opacity: expected a number from 0 to 1, got {opacity}")
        self.num_examples, self.opacity = num_examples, opacity
        self.examples: list[np.ndarray] = []

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
        batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        segment: Any = pl_module.segment
        for image, mask in zip(*batch, strict=True):
            if len(self.examples) >= self.num_examples or not trainer.is_global_zero:
                return
            predicted = segment(image).argmax(dim=0).byte()
            shown = [in_colours(mask), in_colours(predicted)]
            picture = image.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy()
            self.examples.append(np.concatenate([picture, *shown], axis=1))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_test_end(trainer, pl_module)
        if self.examples:
            names: Any = pl_module.class_names
            with replacing(self.folder / "examples.png") as file:
                _together(self.examples, names).save(file, "PNG")
        self.examples = []

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
        batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        predicted: Any = pl_module.predicted
        root: Path = trainer.datamodule.images  # type: ignore[attr-defined]
        root = root if root.is_dir() else root.parent
        for image, path, classes in zip(*batch, predicted, strict=True):
            # the suffix is kept, as a.jpg and a.png may be in one folder
            place = f"{os.path.relpath(path, root)}.png"
            for folder, picture in (
                ("masks", as_indexed(classes)),
                ("overlays", _overlay(image, classes, self.opacity)),
            ):
                file = self.folder / folder / place
                file.parent.mkdir(parents=True, exist_ok=True)
                picture.save(file)


def palette() -> np.ndarray:
    """Return 256 colours, uint8 [256, 3]: those of PASCAL VOC, but white for ignored pixels
    (255)."""
    numbers, colours = np.arange(256), np.zeros((256, 3), dtype=np.uint8)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= (((numbers >> channel) & 1) << (7 - bit)).astype(np.uint8)
        numbers = numbers >> 3
    colours[IGNORED] = 255
    return colours


def as_indexed(classes: Tensor) -> Image.Image:
    """Return class numbers [height, width] as an indexed image with the palette."""
    picture = Image.fromarray(classes.byte().cpu().numpy())
    picture.putpalette(palette().tobytes())
    return picture


def in_colours(classes: Tensor) -> np.ndarray:
    """Return the colours of class numbers [height, width], uint8 [height, width, 3]."""
    return palette()[classes.cpu().numpy()]


def _overlay(image: Tensor, classes: Tensor, opacity: float) -> Image.Image:
    colours = torch.from_numpy(in_colours(classes)).permute(2, 0, 1)
    mixed = torch.lerp(image.expand(3, -1, -1).cpu().float(), colours.float(), opacity)
    return Image.fromarray(mixed.round().byte().permute(1, 2, 0).numpy())


def _together(rows: list[np.ndarray], names: list[str]) -> Image.Image:
    """Arrange rows of pictures below each other, with a legend of the classes at the end."""
    pictures = [Image.fromarray(row) for row in rows]
    grown = [p.resize((f * p.width, f * p.height), Image.Resampling.NEAREST)
             for p in pictures for f in [max(1, -(-_HIGH // p.height))]]  # fmt: skip
    wide, high = max(p.width for p in grown), sum(p.height for p in grown)
    sheet = Image.new("RGB", (wide, high + _LINE * (1 + len(names))), "white")
    pen, top = ImageDraw.Draw(sheet), _LINE
    pen.text((2, 1), "image, truth, prediction", "black")
    for picture in grown:
        sheet.paste(picture, (0, top))
        top += picture.height
    for number, name in enumerate(names):
        pen.rectangle((2, top + 2, 12, top + 11), tuple(palette()[number].tolist()), "black")
        pen.text((18, top), in_picture(name), "black")
        top += _LINE
    return sheet
