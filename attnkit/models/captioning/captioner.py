"""The image captioner: an encoder of images and a decoder of words."""

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from attnkit.core.running import evaluating
from attnkit.models.captioning.generate import Method, Sentences, generate
from attnkit.models.captioning.image_encoders import ImageEncoder
from attnkit.models.captioning.word_decoder import (
    Logits,
    Memory,
    MemoryMask,
    WordDecoder,
    Words,
)
from attnkit.models.vit import Images, OwnSizes


class Captioner(nn.Module):
    """Image captioning: `decoder(encoder(images), words)`.

        logits = captioner(images, words[:, :-1])          teacher forcing
        loss = captioner.loss(images, words)["loss"]
        sentences = captioner.generate(images, method="beam", num_beams=5, return_weights=True)
        maps = sentences.weights.unflatten(-1, captioner.grid)     the attention at each word

    Words are integers: `PAD` 0, `START` 1, `END` 2, `UNKNOWN` 3, then the vocabulary. A sentence is
    START, words, END, then PAD.

    A `ViTEncoder` also takes a list of images [channels, height, width], each of its own size. The
    words of an image then attend only to its own positions; all other weights are 0.

    Args:
        encoder: `CNNEncoder`, `ViTEncoder`, `TimmEncoder`, or any `ImageEncoder`.
        decoder: `TransformerDecoder`, `RecurrentDecoder`, `HardRecurrentDecoder`, or any
            `WordDecoder`.

    Raises:
        ValueError: the decoder's `memory_dim` is not the encoder's `dim`.
    """

    def __init__(self, encoder: ImageEncoder, decoder: WordDecoder) -> None:
        super().__init__()
        if decoder.memory_dim != encoder.dim:
            raise ValueError(
                f"decoder: reads a memory of {decoder.memory_dim} channels, "
                f"but the encoder gives {encoder.dim}"
            )
        self.encoder = encoder
        self.decoder = decoder

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width of the encoder's grid of positions."""
        return self.encoder.grid

    def grid_of(self, images: Images) -> tuple[int, int]:
        """Height and width of the grid of these images, which all have one size."""
        return self.encoder.grid_of(images)

    def encode(
        self, images: Images | OwnSizes
    ) -> Memory | list[Annotated[Tensor, "positions dim"]]:
        """Return the memory of the images; for a list of images, a list of their memories."""
        return self.encoder(images)

    def forward(self, images: Images | OwnSizes, words: Words) -> Logits:
        """Return the logits of the next word after each word."""
        memory, mask = self._memory(images)
        return self.decoder(memory, words, mask)

    def loss(self, images: Images | OwnSizes, words: Words) -> dict[str, Annotated[Tensor, ""]]:
        """Return the loss to minimize, "loss", and its terms; sentences begin with START."""
        memory, mask = self._memory(images)
        return self.decoder.loss(memory, words, mask)

    def generate(
        self, images: Images | OwnSizes, method: Method = "greedy", **options: Any
    ) -> Sentences:
        """Generate sentences for the images, with the options of `attnkit.generate`; the encoder is
        in evaluation mode too."""
        with evaluating(self), torch.no_grad():
            memory, mask = self._memory(images)
            return generate(self.decoder, memory, memory_mask=mask, method=method, **options)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters an optimiser should not shrink."""
        return {
            f"{part}.{name}"
            for part in ("encoder", "decoder")
            for name in getattr(getattr(self, part), "no_weight_decay", set)()
        }

    def _memory(self, images: Images | OwnSizes) -> tuple[Memory, MemoryMask]:
        """Return the memory, and a mask of its positions if the images have several sizes."""
        memory = self.encode(images)
        if isinstance(memory, Tensor):
            return memory, None
        lengths = torch.tensor([len(of_image) for of_image in memory])
        padded = pad_sequence(memory, batch_first=True)
        if lengths.min() == lengths.max():
            return padded, None
        there = torch.arange(padded.shape[1]) < lengths[:, None]
        return padded, there.to(padded.device)
