"""The shared block for the window attention of timm's and torchvision's Swin."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.masks.base import Mask
from attnkit.core.multihead import MultiHeadAttention
from attnkit.surgery.adapters import Adapter


class Windows(Adapter):
    """Replaces timm's `WindowAttention` of Swin, for tokens [batch · windows, tokens, dim]."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend; mask: [windows, tokens, tokens], 0 where a token may look and −100 elsewhere.

        It is added, as in timm: if Swin V2 has learned a low temperature, scores differ by so much
        that −100 does not hide them.
        """
        if mask is not None:
            mask = mask[:, None].repeat(len(x) // len(mask), 1, 1, 1)
        return self.attend(x, bias=mask)


class MapWindows(Adapter):
    """Replaces torchvision's `ShiftedWindowAttention`, for maps [batch, height, width, dim].

    Maps are padded to a multiple of the window, shifted in a circle and cut into windows; tokens of
    a window that were not neighbours before the shift have a bias of −100, as in torchvision.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        dropout: nn.Module,
        bias: nn.Module | None,
        *,
        window: tuple[int, int],
        shift: tuple[int, int],
        mask: Mask | None = None,
    ) -> None:
        super().__init__(attention, dropout, bias, mask)
        self.window = window
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        rows, columns = -(-height // self.window[0]), -(-width // self.window[1])
        padded = rows * self.window[0], columns * self.window[1]
        x = F.pad(x, (0, 0, 0, padded[1] - width, 0, padded[0] - height))
        # with one window along a side there is nothing to shift
        shift = [
            step if count > 1 else 0
            for step, count in ((self.shift[0], rows), (self.shift[1], columns))
        ]
        x = x.roll([-s for s in shift], (1, 2))
        apart = None
        if any(shift):
            region = _regions(padded, self.window, shift, x.device)
            region = self._cut(region[None, ..., None])[..., 0]
            apart = -100.0 * (region[:, :, None] != region[:, None]).to(x.dtype)
            apart = apart[:, None].repeat(len(x), 1, 1, 1)
        windows = self.attend(self._cut(x), bias=apart)
        windows = windows.unflatten(1, self.window).unflatten(0, (len(x), rows, columns))
        x = windows.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return x.roll(shift, (1, 2))[:, :height, :width].contiguous()

    def _cut(self, maps: Tensor) -> Tensor:
        """Cut [batch, height, width, dim] into [batch · windows, tokens, dim]."""
        cut = maps.unflatten(2, (-1, self.window[1])).unflatten(1, (-1, self.window[0]))
        return cut.transpose(2, 3).flatten(0, 2).flatten(1, 2)


def _regions(
    size: tuple[int, int], window: tuple[int, int], shift: list[int], device: torch.device
) -> Tensor:
    """Return the number of the part that each position is of, for parts joined by the shift."""
    sides = []
    for length, cut, moved in zip(size, window, shift, strict=True):
        places = torch.arange(length, device=device)
        sides.append((places >= length - cut).long() + (places >= length - moved).long())
    return 3 * sides[0][:, None] + sides[1]
