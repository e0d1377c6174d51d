"""A captioner as two exported programs. The caller runs the loop that finds the words.

memory = encoder(images)
words = [START, PAD, PAD, …]                  max_words of them
words[i + 1] = argmax decoder(memory, words)[i] over the words but PAD and START, until END
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attnkit.lightning.export.program import Program
from attnkit.models.captioning.word_decoder import END, PAD, START
from attnkit.tasks.images.decode import PREPARED

if TYPE_CHECKING:
    from attnkit.tasks.captioning.module import ImageCaptioning

__all__ = ["captioning_programs"]


class _Encoder(nn.Module):
    """Images to a memory, the normalisation inside."""

    def __init__(self, module: ImageCaptioning) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor) -> Tensor:
        return self.module.model.encode(self.module.normalized(images))


def captioning_programs(module: ImageCaptioning) -> dict[str, Program]:
    """`encoder`, images to a memory, and `decoder`, of each word the logits of the next."""
    decoder, (rows, columns) = module.model.decoder, module.model.grid
    pixels = (module.in_channels, *module.model.encoder.image_size)
    memory = (rows * columns, decoder.memory_dim)
    number, size = decoder.max_words, decoder.vocabulary_size
    is_memory = f"the image at {rows} x {columns} positions, row by row"
    return {
        "encoder": Program(
            _Encoder(module),
            lambda batch: {"images": torch.randint(0, 256, (batch, *pixels), dtype=torch.uint8)},
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
                "words": f"numbers of the vocabulary: START {START}, the words so far, PAD {PAD}; "
                f"END is {END}. What follows a word does not change its logits",
                "logits": "at each word, of the word after it; PAD and START are never said",
            },
        ),
    }
