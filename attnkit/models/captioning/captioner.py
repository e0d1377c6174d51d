"""From images to sentences: an encoder and a decoder of words."""

from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.core.running import evaluating
from attnkit.models.captioning.generate import Method, Sentences, generate
from attnkit.models.captioning.image_encoders import ImageEncoder
from attnkit.models.captioning.word_decoder import Logits, Memory, WordDecoder, Words
from attnkit.models.vit import Images


class Captioner(nn.Module):
    """Image captioning: `decoder(encoder(images), words)`.

        logits = captioner(images, words[:, :-1])          teacher forcing
        loss = captioner.loss(images, words)["loss"]
        said = captioner.generate(images, method="beam", num_beams=5, return_weights=True)
        maps = said.weights.unflatten(-1, captioner.grid)  where it looked at each word

    Words are integers: `PAD` 0, `START` 1, `END` 2, `UNKNOWN` 3 and those of the vocabulary; a
    sentence is START, words, END, then PAD.

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

    def encode(self, images: Images) -> Memory:
        """The memory of the images."""
        return self.encoder(images)

    def forward(self, images: Images, words: Words) -> Logits:
        """The logits of the next word, after each word."""
        return self.decoder(self.encoder(images), words)

    def loss(self, images: Images, words: Words) -> dict[str, Annotated[Tensor, ""]]:
        """The loss to minimize, "loss", and its terms; sentences begin with START."""
        return self.decoder.loss(self.encoder(images), words)

    def generate(self, images: Images, method: Method = "greedy", **options: Any) -> Sentences:
        """Sentences for the images, with the options of `attnkit.generate`; the encoder, too, is in
        evaluation mode."""
        with evaluating(self), torch.no_grad():
            return generate(self.decoder, self.encoder(images), method=method, **options)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters an optimiser should not shrink."""
        return {
            f"{part}.{name}"
            for part in ("encoder", "decoder")
            for name in getattr(getattr(self, part), "no_weight_decay", set)()
        }
