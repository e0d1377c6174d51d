"""Attention inside of torch's `multi_head_attention_forward`, which all of its modules call."""

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnkit.core.check import check_inputs
from attnkit.core.kernels.record import note_kernel
from attnkit.core.listeners import Seen, tell, unheard
from attnkit.core.watch.taps.products import sdpa_inputs

_NUM_HEADS = 4  # its place among the arguments
_PRODUCTS = (torch.bmm, torch.baddbmm)


def told_multi_head(args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """What the function returns, of whose attention the listeners are told.

    Without weights it calls `scaled_dot_product_attention`, with weights it multiplies itself.
    """
    num_heads = args[_NUM_HEADS] if len(args) > _NUM_HEADS else kwargs["num_heads"]
    with unheard() as listeners:
        with _Inside(num_heads) as inside:
            result = _body()(*args, **kwargs)
        if inside.seen is not None:
            tell(listeners, inside.seen)
    if len(inside.factors) == 2:
        note_kernel("math")  # of this function records see the whole alone, which did not run
    return result


def _body() -> FunctionType:
    """The function without its first lines, which would give the whole call to the open modes."""
    whole: Any = F.multi_head_attention_forward
    names = {**whole.__globals__, "has_torch_function": lambda tensors: False}
    return FunctionType(whole.__code__, names, whole.__name__, whole.__defaults__)


class _Inside(TorchFunctionMode):
    """Sees the attention itself: torch's function, or two products."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.factors: list[tuple[Tensor, ...]] = []
        self.dropout_p = 0.0
        self.seen: Seen | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            inputs = sdpa_inputs(*args, **(kwargs or {}))
            self.seen = Seen("multi_head_attention_forward", inputs, output)
        elif func is F.dropout:
            self.dropout_p = (kwargs or {})["p"]
        elif func in _PRODUCTS:
            self.factors.append(args)
            if len(self.factors) == 2:
                return self._of_products(output).flatten(0, 1)
        return output

    def _of_products(self, output: Tensor) -> Tensor:
        (*mask, query, transposed_key), (_, value) = self.factors
        heads = [self._by_heads(t) for t in (query, transposed_key.mT, value, *mask, output)]
        query, key, value, *bias, output = heads
        inputs = check_inputs(
            query, key, value, bias=bias[0] if bias else None, scale=1.0, dropout_p=self.dropout_p
        )
        self.seen = Seen("multi_head_attention_forward", inputs, output)
        return output

    def _by_heads(self, tensor: Tensor) -> Tensor:
        """[batch, heads, …] of [batch · heads, …], or of one for all."""
        return tensor[None] if len(tensor) == 1 else tensor.unflatten(0, (-1, self.num_heads))
