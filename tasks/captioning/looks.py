"""Measure the attention that words of a caption pay to the objects they name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from attnkit.lightning.errors import UserError
from attnkit.lightning.files import write_csv
from attnkit.metrics.maps import on_grid
from attnkit.tasks.captioning.grammar import attribute_of, words_of_objects
from attnkit.tasks.captioning.tokenizer import END, PAD, Tokenizer, words_of
from attnkit.tasks.images.scenes import Scene

NAMING = {"noun": "kind", "colour": "colour"}


def tokens_of_words(tokenizer: Tokenizer, ids: list[int]) -> list[list[int]]:
    """Return for each word of a sentence, as `words_of` splits it, the places of its tokens."""
    found: list[list[int]] = []
    for place, number in enumerate(ids):
        if number in (PAD, END):
            break
        count = len(words_of(tokenizer.decode(ids[: place + 1])))
        found += [[] for _ in range(count - len(found))]
        if found:
            found[-1].append(place)
    return found


def named_objects(
    tokenizer: Tokenizer, ids: list[int], scene: Scene
) -> list[tuple[str, list[int], int]]:
    """Return the nouns and colours of a sentence that name an object of its scene, each as the
    attribute, the places of the word's tokens in `ids`, and the index of the object."""
    caption = tokenizer.decode(ids)
    words, places = words_of(caption), tokens_of_words(tokenizer, ids)
    return [
        (str(attribute_of(words[word])), places[word], number)
        for word, number in words_of_objects(caption, scene)
    ]


class Look(NamedTuple):
    """The attention of one head on the objects that one kind of words names, a mean over the words.

    `share` is the attention on the pixels of the named object, `chance` the share of the image that
    these pixels cover, `ratio` is share / chance, and `num_words` the number of words.
    """

    layer: int
    head: int
    words: str
    share: float
    chance: float
    ratio: float
    num_words: int


class ObjectLooks(Metric):
    """The attention of nouns and colours on the objects that they name, for each head.

    The metric counts the words of generated sentences that name an object of their scene
    (`words_of_objects`). The weights of a word are the mean over its tokens. The result is exact
    over all sentences and processes.

    Args:
        num_layers, num_heads: the numbers of layers and heads of the decoder.
    """

    full_state_update: bool = False

    share: Tensor
    chance: Tensor
    count: Tensor

    def __init__(self, num_layers: int, num_heads: int) -> None:
        super().__init__()
        kinds = len(NAMING)
        self.add_state("share", torch.zeros(kinds, num_layers, num_heads), "sum")
        self.add_state("chance", torch.zeros(kinds), "sum")
        self.add_state("count", torch.zeros(kinds), "sum")

    def update(
        self,
        ids: Tensor,
        weights: Tensor,
        masks: Tensor,
        scenes: list[Scene],
        grid: tuple[int, int],
        tokenizer: Tokenizer,
    ) -> None:
        """Add sentences.

        Args:
            ids: `Sentences.words`, integers [batch, words]: without START.
            weights: `Sentences.weights`, [batch, layers, heads, words, positions].
            masks: booleans [batch, objects, height, width].
            scenes: the scene of each sentence; `masks` are those of its objects.
            grid: rows and columns of positions.
            tokenizer: the tokenizer of `ids`.
        """
        covered = on_grid(masks, grid).to(weights.dtype).flatten(2)
        chances = masks.float().mean(dim=(2, 3))
        for item, (numbers, scene) in enumerate(zip(ids.tolist(), scenes, strict=True)):
            for attribute, places, number in named_objects(tokenizer, numbers, scene):
                kind = list(NAMING.values()).index(attribute)
                attention = weights[item, :, :, places].mean(dim=2)
                self.share[kind] += attention @ covered[item, number]
                self.chance[kind] += chances[item, number]
                self.count[kind] += 1

    def compute(self) -> list[Look]:
        """Return a row for each layer, head and kind of words that occurred."""
        rows = []
        for kind, name in enumerate(NAMING):
            if count := int(self.count[kind]):
                chance = float(self.chance[kind]) / count
                for layer, heads in enumerate((self.share[kind] / count).tolist()):
                    for head, share in enumerate(heads):
                        rows.append(Look(layer, head, name, share, chance, share / chance, count))
        return rows


class WordLooks(Callback):
    """Callback that measures, in a test on scenes, the attention of words on what they name.

    It writes `looks.csv`, a row for each test set and `Look`, with layers and heads counted from 0,
    and logs the largest ratio to chance of all heads as `test/looks_noun` and `test/looks_colour`,
    and `test/compositional/…`. It warns if the batches have no `masks` and `scene`.

    Args:
        folder: where `looks.csv` is written; it is created if it does not exist.

    Raises:
        UserError: the module is not an `ImageCaptioning`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self._metrics: dict[str, ObjectLooks] = {}
        self._rows: list[tuple[Any, ...]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not hasattr(pl_module, "return_weights"):
            raise UserError(
                f"WordLooks: expected an ImageCaptioning, got {type(pl_module).__name__}"
            )

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._metrics, self._rows = {}, []
        cast(Any, pl_module).return_weights = True

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not (isinstance(batch, Mapping) and batch.keys() >= {"masks", "scene"}):
            return
        module = cast(Any, pl_module)
        words, weights = module.said.words, module.said.weights
        split = list(module.test_metrics)[dataloader_idx]
        if split not in self._metrics:
            self._metrics[split] = ObjectLooks(*weights.shape[1:3]).to(module.device)
        scenes = batch["masks"], batch["scene"]
        self._metrics[split].update(words, weights, *scenes, module.model.grid, module.tokenizer)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for split, metric in self._metrics.items():
            looks = metric.compute()
            self._rows += [(split, *look) for look in looks]
            prefix = "test" if split == "test" else f"test/{split}"
            for name in {look.words: None for look in looks}:
                best = max(look.ratio for look in looks if look.words == name)
                pl_module.log(f"{prefix}/looks_{name}", best, sync_dist=True)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        cast(Any, pl_module).return_weights = False
        if not self._metrics:
            rank_zero_warn("WordLooks: the data has no masks of what words name; no looks.csv")
        elif trainer.is_global_zero:
            write_csv(self.folder / "looks.csv", ("test", *Look._fields), self._rows)
