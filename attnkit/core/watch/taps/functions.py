"""Attention that is computed by torch's functions, whoever calls them."""

from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnkit.core.listeners import LISTENERS, is_recomputed, tell_missed
from attnkit.core.watch.taps.eager import EagerAttention
from attnkit.core.watch.taps.multihead import told_multi_head
from attnkit.core.watch.taps.products import told_product


class FunctionTap(TorchFunctionMode):
    """Tells the listeners of torch's `scaled_dot_product_attention` and
    `multi_head_attention_forward`, and that there is attention computed without them.

    Of several that are open the innermost tells all listeners.
    """

    def __init__(self) -> None:
        super().__init__()
        self.eager = EagerAttention()

    def __enter__(self):
        _OPEN.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        _OPEN.remove(self)
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _OPEN[-1] is not self or not LISTENERS or is_recomputed():
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return told_product(args, kwargs)
        if func is F.multi_head_attention_forward:
            return told_multi_head(args, kwargs)
        output = func(*args, **kwargs)
        if self.eager.is_found(func, args, kwargs, output):
            tell_missed(LISTENERS)
        return output


_OPEN: list[FunctionTap] = []
