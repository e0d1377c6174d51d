"""A picture of a training: a file, and every logger that takes images."""

from pathlib import Path

from lightning import Trainer
from matplotlib.figure import Figure
from PIL import Image

from attnkit.interpret.picture import pixels_of
from attnkit.lightning.files import replacing
from attnkit.lightning.loggers.pictures import log_picture


def show(trainer: Trainer, name: str, figure: Figure, path: Path) -> None:
    """Write it as PNG, and log it under a name."""
    pixels = pixels_of(figure)
    with replacing(path) as file:
        Image.fromarray(pixels).save(file, "PNG")
    log_picture(trainer, name, pixels)
