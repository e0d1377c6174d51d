"""The LightningModule of image captioning; users subclass it or copy it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from attnkit.core.arguments import at_least
from attnkit.lightning import TaskModule
from attnkit.lightning.export import Program
from attnkit.lightning.modules.checks import (
    check_monitors,
)
from attnkit.lightning.modules.measured import mean_of_losses
from attnkit.lightning.protocols import Explained
from attnkit.metrics import BLEU, ROUGEL, CIDEr, CIDErD
from attnkit.models.captioning.captioner import Captioner
from attnkit.models.captioning.generate import Sentences, checked_options
from attnkit.models.captioning.word_decoder import num_words
from attnkit.tasks.captioning.grammar import EVERYTHING, OBJECTS_COLOURS_RELATION, is_right
from attnkit.tasks.captioning.looks import named_objects
from attnkit.tasks.captioning.tokenizer import END, PAD, START, load_tokenizer
from attnkit.tasks.images.decode import PREPARED
from attnkit.tasks.images.module import NormalizesImages


class ImageCaptioning(NormalizesImages, TaskModule):
    """Captioning module: training by teacher forcing, evaluation by decoding and caption metrics.

    The module normalises images itself and holds its vocabulary, so that a checkpoint is enough to
    caption. It logs at the end of an epoch, exactly over all samples and processes: `train/loss`
    (which is minimised), `val/loss` (cross-entropy per word of the first caption), and
    `val/cider_d` and `val/bleu4` of the generated sentences. The test logs `test/bleu1` to
    `test/bleu4`, `test/rouge_l`, `test/cider` and `test/cider_d`; metrics of further test sets have
    their name, such as `test/compositional/bleu4`. If batches have a `scene`, the test also logs
    `…/right`, the share of sentences that name both objects, their colours and the relation
    correctly, and `…/all_right`, for which sizes and textures must be correct too.

    Args:
        model: a `Captioner` of images [batch, in_channels, height, width]; a module, or its
            configuration (see `TaskModule`).
        optimizer, scheduler, finetune: see `TaskModule`.
        vocabulary: the tokenizer as plain data, from `Tokenizer.to_dict`.
        max_words: length of the longest sentence, START and END included, as in a batch's `words`.
        image_size: side of the images in pixels.
        interpolation, crop_pct, value_range: how images were resized to it, see `Fit`.
        in_channels: 1 (grey) or 3 (RGB).
        max_image_tokens: batches are lists of images of different sizes, each of at most this many
            patches (`native` of `CaptionFilesData`); None: all images have one size.
        mean, std: mean and deviation of the training pixels, scaled to [0, 1], per channel.
        method: how test and prediction decode sentences, "greedy", "beam" or "sample"; validation,
            which runs every epoch, is greedy.
        num_beams, length_penalty, temperature, top_k, top_p: options of the method,
            as in `Captioner.generate`. Samples depend only on the seed and the place in the data,
            so that a repeated test gives the same results.
    """

    model: Captioner

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        optimizer: Callable[..., Optimizer] | Mapping[str, Any] | None = None,
        scheduler: Callable[..., LRScheduler] | Mapping[str, Any] | None = None,
        finetune: Callable[[nn.Module], Any] | Mapping[str, Any] | None = None,
        *,
        vocabulary: Mapping[str, Any],
        max_words: int,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        interpolation: str | None = None,
        crop_pct: float | None = None,
        value_range: Sequence[float] | None = None,
        in_channels: int = 3,
        max_image_tokens: int | None = None,
        method: str = "greedy",
        num_beams: int | None = None,
        length_penalty: float = 0.0,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> None:
        super().__init__(model, optimizer, scheduler, finetune)
        if not isinstance(self.model, Captioner):
            raise TypeError(f"model: expected a Captioner, got {type(self.model).__name__}")
        self.tokenizer = load_tokenizer(vocabulary)
        self._check_fits_model(max_words, image_size)
        self.vocabulary = vocabulary
        self.max_words = max_words
        at_least(1, max_image_tokens=max_image_tokens)
        self.max_image_tokens = max_image_tokens
        how = interpolation, crop_pct, value_range
        self.expect_images(image_size, in_channels, mean, std, *how)
        self.decoding: dict[str, Any] = {
            "method": method,
            "num_beams": num_beams,
            "length_penalty": length_penalty,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
        }
        checked_options(**self.decoding)
        self.return_weights = False
        self.said: Sentences | None = None
        self.train_loss, self.val_loss = mean_of_losses(), mean_of_losses()
        self.val_metrics = nn.ModuleDict(
            {"cider_d": CIDErD(tokenizer="words"), "bleu4": BLEU(4, "words")}
        )
        self.test_metrics = nn.ModuleDict()

    def _check_fits_model(self, max_words: int, image_size: int) -> None:
        decoder, encoder = self.model.decoder, self.model.encoder
        if decoder.vocabulary_size != len(self.tokenizer):
            raise ValueError(
                f"vocabulary: {len(self.tokenizer)} words, "
                f"but the decoder was made for {decoder.vocabulary_size}"
            )
        # the decoder reads START but need not read END
        if not 3 <= max_words <= decoder.max_words + 1:
            raise ValueError(
                f"max_words: expected 3 to {decoder.max_words + 1} with START and END, "
                f"as the decoder's max_words is {decoder.max_words}, got {max_words}"
            )
        if encoder.image_size != (image_size, image_size):
            raise ValueError(
                f"image_size: got {image_size}, but the encoder was made for "
                f"{' x '.join(map(str, encoder.image_size))} pixels"
            )

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        """Return the logits of the word after each word; images are uint8 or float in [0, 1]."""
        return self.model(self.normalized(images), words)

    def caption(self, images: Tensor, **decoding: Any) -> list[str]:
        """Return the captions of images; options are those of `Captioner.generate`."""
        return self._texts(self._say(images, **decoding))

    def explained(self, batch: Mapping[str, Any]) -> Explained:
        """Return the inputs of `attnkit.explain` for a batch: model, images, generated captions."""
        images = batch["image"]
        if isinstance(images, list) and len({image.shape for image in images}) == 1:
            images = torch.stack(images)
        several = isinstance(images, list)
        pixels: Any = [*map(self.as_floats, images)] if several else self.as_floats(images)
        said = self._say(pixels, **self._decoding(0)).words
        words = [[number for number in row if number != PAD] for row in said.tolist()]
        scenes = zip(words, batch.get("scene", ()), batch.get("masks", ()), strict=False)
        named = [
            {place: masks[number] for _, places, number in
             named_objects(self.tokenizer, ids, scene) for place in places}
            for ids, scene, masks in scenes
        ]  # fmt: skip
        made = Explained(
            self.model,
            self.normalized(pixels),
            pictures=pixels,
            sentences=said,
            words=[
                ["<end>" if number == END else self.tokenizer.decode([number]) for number in row]
                for row in words
            ],
            names=[str(name) for name in batch.get("path", ())],
            named=named,
        )
        if made.has_sizes:
            made.notes.append("images of different sizes: each has its own grid")
        return made

    def programs(self) -> dict[str, Program]:
        """Return two programs to export: `encoder` maps uint8 images to a memory, `decoder` maps
        the memory and words to the logits of the word after each word.

        The caller runs the loop that generates the words:

            memory = encoder(images)
            words = [START, PAD, PAD, …]                  length max_words
            words[i + 1] = argmax decoder(memory, words)[i] over the words but PAD and START
        """
        decoder, (rows, columns) = self.model.decoder, self.model.grid
        pixels = (self.in_channels, *self.model.encoder.image_size)
        memory = (rows * columns, decoder.memory_dim)
        number, size = decoder.max_words, decoder.vocabulary_size
        is_memory = f"the image at {rows} x {columns} positions, row by row"
        return {
            "encoder": Program(
                _Encoder(self),
                lambda batch: {"images": torch.randint(0, 256, (batch, *pixels)).byte()},
                {"images": ("batch", *pixels)},
                ("memory", ("batch", *memory)),
                {"images": PREPARED, "memory": is_memory},
            ),
            "decoder": Program(
                decoder,
                lambda batch: {
                    "memory": torch.randn(batch, *memory),
                    "words": torch.randint(0, size, (batch, number)),
                },
                {"memory": ("batch", *memory), "words": ("batch", number)},
                ("logits", ("batch", number, size)),
                {
                    "memory": is_memory,
                    "words": f"numbers of the vocabulary: START {START}, the words so far, PAD "
                    f"{PAD}; END is {END}. What follows a word does not change its logits",
                    "logits": "at each word, of the word after it; PAD and START are never said",
                },
            ),
        }

    def facts(self) -> dict[str, Any]:
        return {
            "vocabulary": self.vocabulary,
            "max_words": self.max_words,
            "preprocessing": self.preprocessing(),
        }

    def metrics(self) -> dict[str, Metric]:
        """Return new test metrics, which are updated with sentences and lists of references."""
        bleu = {f"bleu{n}": BLEU(n, "words") for n in range(1, 5)}
        return {**bleu, "rouge_l": ROUGEL("words"), "cider": CIDEr(tokenizer="words"),
                "cider_d": CIDErD(tokenizer="words")}  # fmt: skip

    def setup(self, stage: str) -> None:
        splits = getattr(getattr(self.trainer, "datamodule", None), "test_splits", ("test",))
        for split in splits:
            if split not in self.test_metrics:
                self.test_metrics[split] = nn.ModuleDict(self.metrics()).to(self.device)

    def on_fit_start(self) -> None:
        """Raise UserError if a callback or the schedule monitors a metric that is never logged, or
        takes its worst value for the best."""
        validation: dict[str, object] = {"val/loss": self.val_loss}
        validation |= {f"val/{name}": metric for name, metric in self.val_metrics.items()}
        check_monitors(self, validation)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        terms = self.model.loss(self.normalized(batch["image"]), batch["words"])
        loss = terms.pop("loss")
        self.train_loss.update(loss.detach().expand(len(batch["words"])))
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True)
        if len(terms) > 1:
            for name, term in terms.items():
                self.log(f"train/{name}", term.detach(), on_step=False, on_epoch=True,
                         batch_size=len(batch["words"]), sync_dist=True)  # fmt: skip
        return loss

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        loss = self.model.loss(self.normalized(batch["image"]), batch["words"])["cross_entropy"]
        self.val_loss.update(loss.expand(int(num_words(batch["words"]))))
        self.log("val/loss", self.val_loss)
        said = self.caption(batch["image"])
        for name, module in self.val_metrics.items():
            metric = cast(Metric, module)
            metric.update(said, batch["references"])
            self.log(f"val/{name}", metric, prog_bar=name == "cider_d")

    def test_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        split = list(self.test_metrics)[dataloader_idx]
        prefix = "test" if split == "test" else f"test/{split}"
        self.said = self._say(batch["image"], **self._decoding(batch_idx))
        said = self._texts(self.said)
        for name, module in cast(nn.ModuleDict, self.test_metrics[split]).items():
            metric = cast(Metric, module)
            metric.update(said, batch["references"])
            self.log(f"{prefix}/{name}", metric, on_epoch=True, add_dataloader_idx=False)
        if "scene" in batch:
            pairs = list(zip(said, batch["scene"], strict=True))
            for name, of in (("right", OBJECTS_COLOURS_RELATION), ("all_right", EVERYTHING)):
                share = sum(is_right(text, scene, of) for text, scene in pairs) / len(pairs)
                self.log(f"{prefix}/{name}", share, on_epoch=True, batch_size=len(pairs),
                         sync_dist=True, add_dataloader_idx=False)  # fmt: skip

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> dict[str, list[Any]]:
        """Return the sentences of a batch, one list entry per image.

        Returns:
            `caption` and `log_probability`, and `path` or `id` if the batch has them. The attribute
            `said` then holds the `Sentences`, with their attention if `return_weights` is True.
        """
        images = batch["image"]
        rows: dict[str, list[Any]] = {
            key: list(batch[key]) for key in ("path", "id") if key in batch
        }
        if not len(images):
            return {**rows, "caption": [], "log_probability": []}
        self.said = self._say(images, **self._decoding(batch_idx))
        rows["caption"] = self._texts(self.said)
        rows["log_probability"] = self.said.scores.tolist()
        return rows

    def _decoding(self, batch_idx: int) -> dict[str, Any]:
        options = {**self.decoding, "return_weights": self.return_weights}
        if self.decoding["method"] == "sample":
            options["generator"] = torch.Generator(self.device)
            # torch's generator on the CPU reads only 32 bits of a seed
            options["generator"].manual_seed((torch.initial_seed() * 1_000_003 + batch_idx) % 2**32)
        return options

    def _say(self, images: Tensor, **decoding: Any) -> Sentences:
        """Generate sentences of at most the training length, START not counted."""
        options = {"max_words": self.max_words - 1, **decoding}
        return self.model.generate(self.normalized(images), **options)

    def _texts(self, said: Sentences) -> list[str]:
        return [self.tokenizer.decode(words) for words in said.words.tolist()]


class _Encoder(nn.Module):
    """Encodes uint8 images to a memory; includes the normalisation."""

    def __init__(self, module: ImageCaptioning) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor) -> Tensor:
        return self.module.model.encoder(self.module.normalized(images))
