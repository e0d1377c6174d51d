"""One page for each image: what the model says of it, and where it looked at each word."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from lightning import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor

from attnkit.interpret.colours import overlay_scale
from attnkit.interpret.picture import Panel, Row, as_picture, draw, save
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import in_log_folder, replacing
from attnkit.models.captioning.word_decoder import END, PAD


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
            page = self._page(image, outputs["caption"][number], words, maps)
            save(self.folder / f"{stem}.png", page)
            self.pages += 1

    def _page(self, image: Tensor, caption: str, words: list[str], maps: Tensor) -> Figure:
        picture, shown = as_picture(image), maps[self.layer].mean(0)
        panels = [Panel(picture, *one) for one in zip(shown, words, strict=True)]
        label = "attention, one scale for all words"
        row = Row([Panel(picture), *panels], overlay_scale(shown), label)
        return draw([row], heading=caption)


def _module(module: Any) -> Any:
    if not hasattr(module, "return_weights"):
        raise UserError(f"WordMaps: expected an ImageCaptioning, got {type(module).__name__}")
    return module


def _words(tokenizer: Any, numbers: list[int]) -> list[str]:
    """Each of the words that were said, the end too."""
    said = (number for number in numbers if number != PAD)
    return ["<end>" if number == END else tokenizer.decode([number]) for number in said]
