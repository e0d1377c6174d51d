"""Attention that is computed by torch's functions, whoever calls them."""

from collections.abc import Callable
from typing import Any

from torch.nn import functional as F

from attnkit.core.listeners import LISTENERS, is_recomputed, tell_missed, unheard
from attnkit.core.watch.taps.eager import EagerAttention
from attnkit.core.watch.taps.multihead import told_multi_head
from attnkit.core.watch.taps.products import told_product


class FunctionTap:
    """Tells the listeners of torch's `scaled_dot_product_attention` and
    `multi_head_attention_forward`, and that there is attention computed without them; for
    `functions_handled`.

    Of several that are open the innermost tells all listeners.
    """

    def __init__(self) -> None:
        self.eager = EagerAttention()

    def __call__(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if not LISTENERS.get() or is_recomputed():
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return told_product(args, kwargs)
        if func is F.multi_head_attention_forward:
            return told_multi_head(args, kwargs)
        with unheard() as listeners:
            output = func(*args, **kwargs)
        if self.eager.is_found(func, args, kwargs, output):
            tell_missed(listeners)
        return output
