"""Hides tokens from all attention of a model."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias

from attnkit.core.contexts import Opened, uncompiled
from attnkit.core.masks.base import Mask, as_mask
from attnkit.core.masks.sequences import Padding
from attnkit.core.running import functions_handled, interface_handled

_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


class HiddenKeys:
    """The hidden keys, which it hides from the attention functions of torch and transformers, and
    counts of the attentions in which they were hidden.

    Attributes:
        hidden: True = no query may look there.
        num_prefix_tokens, num_suffix_tokens: numbers of keys that most attentions have before and
            behind these; they are never hidden.
        masked: for each number of keys, how many attentions did not look at the hidden keys.
        passed: for each number of keys, how many attentions ran unchanged, having other keys.
    """

    def __init__(
        self,
        hidden: Annotated[Tensor, "batch tokens", bool],
        num_prefix_tokens: int,
        num_suffix_tokens: int,
    ) -> None:
        self.hidden = hidden
        self.num_prefix_tokens = num_prefix_tokens
        self.num_suffix_tokens = num_suffix_tokens
        self.masked: Counter[int] = Counter()
        self.passed: Counter[int] = Counter()

    def kept(self, batch: int, num_keys: int) -> Annotated[Tensor, "batch keys", bool] | None:
        """Count the call and return which keys may be looked at; None if they are other tokens."""
        around = self.num_prefix_tokens, self.num_suffix_tokens
        num_others = num_keys - self.hidden.shape[1]
        fits = len(self.hidden) == batch and num_others in (0, sum(around))
        (self.masked if fits else self.passed)[num_keys] += 1
        return ~F.pad(self.hidden, around if num_others else (0, 0)) if fits else None

    def mask(self, mask: Mask | Tensor | None, query: Tensor, key: Tensor) -> Mask | Tensor | None:
        """Return `attend`'s mask with the hidden keys masked like padding."""
        kept = self.kept(len(query) if query.ndim == 4 else 1, key.shape[-2])
        if kept is None:
            return mask
        kept = kept.to(key.device)
        return Padding(kept) if mask is None else as_mask(mask) & Padding(kept)

    def call_torch(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function of torch, with the keys masked if it is one of attention."""
        if self in HIDING.get():
            if func is F.scaled_dot_product_attention:
                given = dict(zip(_SDPA_ARGUMENTS, args, strict=False)) | kwargs
                kwargs, args = given | self._sdpa_mask(given), ()
            elif func is F.multi_head_attention_forward:
                given = inspect.signature(func).bind(*args, **kwargs).arguments
                kwargs, args = given | self._multi_head_padding(given), ()
        return func(*args, **kwargs)

    def call_interface(
        self,
        name: str,
        function: Callable[..., tuple],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **options: Any,
    ) -> tuple:
        """Call a function of transformers' interface, with the keys masked if it is "eager", which
        adds its mask to the scores. "sdpa" calls torch's function; others have other masks."""
        takes_it = attention_mask is None or isinstance(attention_mask, Tensor)
        if name == "eager" and takes_it and self in HIDING.get():
            kept = self.kept(len(query), key.shape[2])
            if kept is not None:
                if attention_mask is None:
                    attention_mask = query.new_zeros(1, 1, 1, key.shape[2])
                attention_mask = attention_mask[..., : key.shape[2]].masked_fill(
                    ~kept[:, None, None].to(query.device), -torch.inf
                )
        return function(module, query, key, value, attention_mask, *args, **options)

    def _sdpa_mask(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the changed mask arguments of `scaled_dot_product_attention`."""
        query, key, mask = given["query"], given["key"], given.get("attn_mask")
        is_ours = query.ndim in (3, 4) and not isinstance(mask, CausalBias)
        kept = self.kept(len(query) if is_ours else 0, key.shape[-2])
        if kept is None:
            return {}
        kept = kept.to(key.device).reshape(len(query), *[1] * (query.ndim - 2), -1)
        if given.get("is_causal"):
            causal = kept.new_ones(query.shape[-2], key.shape[-2]).tril()
            return {"attn_mask": causal & kept, "is_causal": False}
        if mask is None or mask.dtype == torch.bool:
            return {"attn_mask": kept if mask is None else mask & kept}
        return {"attn_mask": mask.masked_fill(~kept, -torch.inf)}

    def _multi_head_padding(self, given: dict[str, Any]) -> dict[str, Tensor]:
        """Return the changed padding argument of `multi_head_attention_forward`."""
        key, padding, mask = (given.get(n) for n in ("key", "key_padding_mask", "attn_mask"))
        assert isinstance(key, Tensor)
        kept = self.kept(key.shape[1] if key.ndim == 3 else 1, len(key))
        if kept is None:
            return {}
        kept = (kept if key.ndim == 3 else kept[0]).to(key.device)
        if padding is None and mask is not None and mask.is_floating_point():
            padding = torch.zeros_like(kept, dtype=mask.dtype)  # torch needs both in one dtype
        if padding is None:
            padding = ~kept
        elif padding.dtype == torch.bool:
            padding = padding | ~kept
        else:
            padding = padding.masked_fill(~kept, -torch.inf)
        return {"key_padding_mask": padding}


HIDING: Opened[HiddenKeys] = Opened("hidden keys")


@contextmanager
def hide_keys(
    hidden: Annotated[Tensor, "batch tokens", bool],
    num_prefix_tokens: int = 0,
    num_suffix_tokens: int = 0,
) -> Iterator[HiddenKeys]:
    """Hide these tokens in the block: no attention looks at them, as if they were padding.

        with hide_keys(hidden, num_prefix_tokens=1):
            logits = vit(images)    # computed from the class token and the remaining patches

    This reaches `attend`, any call of `F.scaled_dot_product_attention` and
    `F.multi_head_attention_forward`, and the eager attention of transformers' interface, if the
    keys are these tokens, alone or with the prefix and the suffix, and the batch is the same;
    `passed` counts all other calls. The model's own masks stay in force. A hidden token still has
    an output row, which the model may read after the last attention, as the mean over all tokens
    does. Compiled modules run uncompiled in the block. Other threads are reached only if they run
    in this context, as with `asyncio.to_thread`; there, torch's functions are reached if a module
    calls them.

    Args:
        hidden: True = hidden from all attention.
        num_prefix_tokens, num_suffix_tokens: numbers of class and register tokens before and behind
            these tokens; they stay visible.

    Raises:
        ValueError, TypeError: `hidden` has another shape or dtype.
    """
    if not isinstance(hidden, Tensor) or hidden.dtype != torch.bool:
        given = hidden.dtype if isinstance(hidden, Tensor) else type(hidden).__name__
        raise TypeError(f"hidden: expected a boolean tensor, True = hidden, got {given}")
    if hidden.ndim != 2:
        raise ValueError(f"hidden: expected [batch, tokens], got {list(hidden.shape)}")
    hiding = HiddenKeys(hidden, num_prefix_tokens, num_suffix_tokens)
    with (
        HIDING.opened(hiding),
        uncompiled(),
        functions_handled(hiding.call_torch),
        interface_handled(hiding.call_interface),
    ):
        yield hiding


def attend_without_hidden(attend: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
    """Compute `attend(**given)` with the keys masked that the innermost block hides."""
    with HIDING.limited(-1) as (*_, hiding):  # calls inside a kernel are not masked again
        return attend(**given | {"mask": hiding.mask(given["mask"], given["query"], given["key"])})
