"""One page for each image: what the model says of it, and where it looked at each word."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from lightning import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor

from attnkit.lightning.errors import UserError
from attnkit.lightning.files import in_log_folder, replacing
from attnkit.lightning.maps.overlay import overlaid, scale
from attnkit.lightning.maps.picture import as_picture
from attnkit.models.captioning.word_decoder import END, PAD

COLUMNS = 6


class WordMaps(Callback):
    """In prediction, a page and the arrays of each image: `<image>.png` and `<image>.npz`.

    The page shows the image with its caption, and for each word the image in light tones under the
    map of where the decoder looked when it said the word: one layer, the mean over its heads, on
    the encoder's grid, with one scale for all words. The arrays are `words` (strings, the end last)
    and `weights` [layers, heads, words, height, width], of that grid; those of a word add up to 1.

    Args:
        folder: for the files; None for `word_maps` in the trainer's log folder.
        layer: which of the decoder's layers the page shows.

    Raises:
        UserError: in prediction, a layer that the decoder does not have.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, layer: int = -1) -> None:
        self._given_folder = folder
        self.folder: Path | None = None
        self.layer = layer
        self.pages = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.folder = in_log_folder(trainer, self._given_folder, "word_maps")
        _module(pl_module).return_weights = stage == "predict"

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _module(pl_module).return_weights = False

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        module = _module(pl_module)
        if not outputs["caption"]:
            return
        weights = module.said.weights.unflatten(-1, module.model.grid).float().cpu()
        if not -len(weights[0]) <= self.layer < len(weights[0]):
            raise UserError(f"inspect.layer: got {self.layer} of {len(weights[0])} layers")
        names = outputs.get("path") or outputs.get("id") or map(str, range(len(weights)))
        said = zip(names, batch["image"].cpu(), module.said.words.tolist(), weights, strict=True)
        for number, (name, image, numbers, maps) in enumerate(said):
            words = _words(module.tokenizer, numbers)
            maps = maps[:, :, : len(words)]
            stem = f"{trainer.global_rank}_{batch_idx}_{number}_{Path(name).stem}"
            assert self.folder is not None
            with replacing(self.folder / f"{stem}.npz") as file:
                np.savez_compressed(file, words=np.array(words), weights=maps.numpy())
            with replacing(self.folder / f"{stem}.png") as file:
                self._page(image, outputs["caption"][number], words, maps).savefig(file, dpi=110)
            self.pages += 1

    def _page(self, image: Tensor, caption: str, words: list[str], maps: Tensor) -> Figure:
        picture = as_picture(image)
        shown = maps[self.layer].mean(0).numpy()
        top = max(float(shown.max(initial=0)), 1e-12)
        rows = math.ceil((len(words) + 1) / COLUMNS)
        figure = Figure(figsize=(1.9 * COLUMNS + 1, 2.1 * rows + 0.5), layout="constrained")
        figure.suptitle(_shown(caption))
        panels = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
        for panel in panels:
            panel.axis("off")
        panels[0].imshow(picture, interpolation="nearest")
        for panel, word, map_ in zip(panels[1:], words, shown, strict=False):
            panel.imshow(overlaid(picture, map_, top), interpolation="nearest")
            panel.set_title(_shown(word), fontsize=11)
        label = "attention, one scale for all words"
        figure.colorbar(scale(top), ax=list(panels), label=label, shrink=0.8, pad=0.01)
        return figure


def _module(module: Any) -> Any:
    if not hasattr(module, "return_weights"):
        raise UserError(f"WordMaps: expected an ImageCaptioning, got {type(module).__name__}")
    return module


def _words(tokenizer: Any, numbers: list[int]) -> list[str]:
    """Each of the words that were said, the end too."""
    said = (number for number in numbers if number != PAD)
    return ["<end>" if number == END else tokenizer.decode([number]) for number in said]


def _shown(text: str) -> str:
    """For matplotlib, to whom dollar signs would be the ends of a formula."""
    return text.replace("$", r"\$")
