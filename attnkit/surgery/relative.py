"""Biases by position that networks add to scores, and Swin V2's score, with their parameters."""

from __future__ import annotations

import copy
from math import log
from typing import Any, ClassVar

from torch import Tensor, nn

from attnkit.core.scores.kinds import Cosine


class WindowBias(nn.Module):
    """A bias of the positions in a window, whose size may change.

    theirs: timm's attention to which the bias belongs, which makes the tables of another window;
        None: the windows keep their size.
    """

    tables: ClassVar[dict[str, str]]
    """timm's names of the parameters and buffers here that depend on the window."""
    index: Tensor

    def __init__(self, index: Tensor, theirs: nn.Module | None) -> None:
        super().__init__()
        self.register_buffer("index", index, persistent=False)
        # in a list, so that it is no child of this module
        self.theirs = [] if theirs is None else [_shell(theirs)]

    def set_window_size(self, window_size: Any) -> None:
        """Make the tables of another window as timm does; timm's `set_input_size` calls it."""
        (theirs,) = self.theirs
        for ours, name in self.tables.items():
            setattr(theirs, name, getattr(self, ours))
        theirs.set_window_size(window_size)
        for ours, name in self.tables.items():
            setattr(self, ours, getattr(theirs, name))


def _shell(module: nn.Module) -> Any:
    """Return a copy of a module without its parameters and children."""
    shell = copy.copy(module)
    parameters = dict.fromkeys(module._parameters)
    vars(shell).update(_parameters=parameters, _buffers=dict(module._buffers), _modules={})
    return shell


class TableBias(WindowBias):
    """bias[h, i, j] = table[index[i, j], h], with a network's own table and index."""

    tables: ClassVar = {"table": "relative_position_bias_table", "index": "relative_position_index"}

    def __init__(self, table: nn.Parameter, index: Tensor, theirs: nn.Module | None = None) -> None:
        super().__init__(index, theirs)
        self.table = table

    def forward(self) -> Tensor:
        """Return the bias [1, heads, tokens, tokens]."""
        return self.table[self.index].permute(2, 0, 1)[None]


class CoordinateBias(WindowBias):
    """bias[h, i, j] = 16 · sigmoid(mlp(coordinates))[index[i, j], h] (Liu et al., Swin Transformer
    V2, 2022)."""

    tables: ClassVar = {"coordinates": "relative_coords_table", "index": "relative_position_index"}
    coordinates: Tensor

    def __init__(
        self,
        mlp: nn.Module,
        coordinates: Tensor,
        index: Tensor,
        theirs: nn.Module | None = None,
    ) -> None:
        super().__init__(index, theirs)
        self.mlp = mlp
        self.register_buffer("coordinates", coordinates, persistent=False)

    def forward(self) -> Tensor:
        """Return the bias [1, heads, tokens, tokens]."""
        table = self.mlp(self.coordinates).flatten(0, -2)
        return 16 * table[self.index].permute(2, 0, 1)[None].sigmoid()


class GivenBias(nn.Module):
    """The bias of one of timm's modules for relative positions."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self) -> Tensor:
        """Return the bias [1, heads, tokens, tokens]."""
        return self.module.get_bias()  # type: ignore[operator]


class ClampedCosine(nn.Module):
    """`Cosine` with Swin V2's temperature per head, exp(−logit_scale) and at least 0.01."""

    def __init__(self, logit_scale: nn.Parameter) -> None:
        super().__init__()
        self.logit_scale = logit_scale

    def forward(self) -> Cosine:
        return Cosine(self.logit_scale.flatten().clamp(max=log(100)).neg().exp())
