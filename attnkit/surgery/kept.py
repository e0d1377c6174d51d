"""A module of another library that keeps its parameters and projections around `attend`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from attnkit.core.attend import attend
from attnkit.core.capture.functions import ComputedBy
from attnkit.core.masks.base import Mask
from attnkit.core.normalizers import Normalizer
from attnkit.core.scores.kinds import Score
from attnkit.surgery.adapters import Adapter, Given, ours

Forward = Callable[..., Any]
"""(module, attend, *arguments of its forward): runs its forward, with `attend(query, key, value,
attn_mask, dropout_p, scale=…)` as attention, which has the arguments of torch's function."""


class HeadAttention(nn.Module):
    """`attend` for queries, keys and values that are heads already: the shared block without its
    projections.

    score: replaces the network's own; None: that one is used.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.key_dim = num_heads * head_dim
        self.score: Score | nn.Module | None = None
        self.normalizer: Normalizer | nn.Module | None = None
        self.backend = "auto"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        own: str | Score,
        scale: float | None,
        mask: Given,
        bias: Tensor | None,
        dropout_p: float,
    ) -> Tensor:
        """Attend with `own` and `scale`, the network's score; the rest is as in `attend`."""
        score: Any = self.score() if isinstance(self.score, nn.Module) else self.score
        normalizer: Any = self.normalizer
        if normalizer is not None and not self.training:
            normalizer = normalizer.evaluated()
        return attend(
            query,
            key,
            value,
            score=own if score is None else score,
            scale=scale if score is None else None,
            mask=mask,
            bias=bias,
            normalizer="softmax" if normalizer is None else normalizer,
            dropout_p=dropout_p,
            backend=self.backend,
        )


class Kept(Adapter):
    """Replaces `theirs` and computes the same with its parameters and modules."""

    def __init__(
        self, attention: HeadAttention, theirs: nn.Module, forward: Forward, mask: Mask | None
    ) -> None:
        # a block without projections, which is given no tokens
        super().__init__(attention, nn.Identity(), mask=mask)  # type: ignore[arg-type]
        self.theirs: Any = copy.copy(theirs)
        if hasattr(theirs, "fused_attn"):
            vars(self.theirs)["fused_attn"] = True
        self.their_forward = forward

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.their_forward(self.theirs, self._attend, *given, **named)

    def __getattr__(self, name: str) -> Any:
        """Return attributes that networks read, such as the stride of queries, from `theirs`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            theirs = vars(self).get("_modules", {}).get("theirs")
            if theirs is None:
                raise
            return getattr(theirs, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that only `theirs` has there, where its forward reads it."""
        parts = vars(self).get("_modules", {})
        own = vars(self).keys() | parts | vars(self).get("_parameters", {}).keys()
        if name in own or hasattr(type(self), name) or not hasattr(parts.get("theirs"), name):
            super().__setattr__(name, value)
        else:
            setattr(self.theirs, name, value)

    def set_window_size(self, window_size: Any) -> None:
        self.theirs.set_window_size(window_size)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        score: str | Score = "scaled_dot",
    ) -> Tensor:
        """Attend as torch's function does. With three dimensions, images and heads are the first;
        with five, images and windows are the first two."""
        tensors: tuple[Tensor, ...] = query, key, value
        shape = query.shape
        if query.ndim == 3:
            heads = (-1, self.attention.num_heads)
            tensors = tuple(tensor.unflatten(0, heads) for tensor in tensors)
            attn_mask = None if attn_mask is None else attn_mask.unflatten(0, heads)
        elif query.ndim == 5:
            tensors = tuple(tensor.flatten(0, 1) for tensor in tensors)
        mask, bias = ours(attn_mask, is_causal)
        options = {"own": score, "scale": scale, "dropout_p": dropout_p, "bias": bias}
        output = self.attention(*tensors, **options, mask=self._both(mask))
        return output.reshape(*shape[:-1], value.shape[-1])


def fused(theirs: nn.Module, attend: Callable[..., Tensor], *given: Any, **named: Any) -> Any:
    """Run the forward of a module that calls torch's function, which is `attend` meanwhile.

    Raises:
        RuntimeError: `fused_attn` was set to False, as is usual to see weights: the module would
            compute attention itself.
    """
    if not getattr(theirs, "fused_attn", True):
        raise RuntimeError(
            "fused_attn: expected True, got False: attnkit computes this attention, and "
            "attnkit.capture_attention gives its weights"
        )
    with ComputedBy(attend):
        return theirs(*given, **named)
