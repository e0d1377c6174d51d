"""Pictures for loggers that take them."""

from typing import Any

import numpy as np
from lightning import Trainer


def log_picture(trainer: Trainer, name: str, pixels: np.ndarray) -> None:
    """Give a picture, uint8 [height, width, 3], to every logger that takes images: Weights & Biases
    and TensorBoard."""
    for logger in trainer.loggers:
        if hasattr(logger, "log_image"):
            logger.log_image(name, images=[pixels], step=trainer.global_step)
            continue
        writer: Any = getattr(logger, "experiment", None)
        if writer is not None and hasattr(writer, "add_image"):
            writer.add_image(name, pixels, trainer.global_step, dataformats="HWC")
