"""Observation of attention that functions of torch and of transformers compute, whoever calls them.

Models of transformers get the function that their configuration names from `AttentionInterface`.
The function of "sdpa" calls torch's and that of "attnkit" calls `attend`. "eager",
"flex_attention", the flash kernels and functions that users register are observed at the interface.
Nothing of transformers is imported.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from attnkit.core.capture.calls import AttentionCall
from attnkit.core.inputs import Inputs, check_inputs
from attnkit.core.kernels.record import note_kernel
from attnkit.core.listeners import (
    LISTENERS,
    Seen,
    is_recomputed,
    notify,
    notify_missed,
    without_listeners,
)
from attnkit.core.masks.base import Mask, as_mask
from attnkit.core.masks.sequences import Causal, Padding
from attnkit.core.running import interface_handled
from attnkit.core.scores.kinds import ScaledDot

SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
PRODUCTS = {
    torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, Tensor.matmul, Tensor.bmm,
    Tensor.baddbmm, Tensor.__matmul__, Tensor.__rmatmul__,
}  # fmt: skip


_NUM_HEADS = 4  # the position of num_heads in the arguments of `multi_head_attention_forward`


class FunctionTap:
    """Handler for `functions_handled` that notifies the listeners of torch's
    `scaled_dot_product_attention` and `multi_head_attention_forward`, and of attention that is
    computed without them, by a softmax and a product with other activations.

    A softmax of three dimensions or more is followed through operations that keep its number of
    elements, such as dropout and reshaping. The innermost of several open taps notifies all
    listeners.
    """

    def __init__(self) -> None:
        self.weights = WeakTensorKeyDictionary()

    def __call__(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if not LISTENERS.get() or is_recomputed():
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _observed_sdpa(args, kwargs)
        if func is F.multi_head_attention_forward:
            return _observed_multi_head(args, kwargs)
        with without_listeners() as listeners:
            output = func(*args, **kwargs)
        if self._is_attention(func, args, kwargs, output):
            notify_missed(listeners)
        return output

    def _is_attention(self, func: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> bool:
        """Return whether this call of torch multiplies a softmax with other activations."""
        if func in SOFTMAX:
            if isinstance(output, Tensor) and output.ndim >= 3:
                self.weights[output] = True
            return False
        if not self.weights:
            return False
        tensors = [given for given in (*args, *kwargs.values()) if isinstance(given, Tensor)]
        followed = [tensor for tensor in tensors if tensor in self.weights]
        if not followed:
            return False
        if func in PRODUCTS:
            return not any(_is_parameter(tensor) for tensor in tensors)
        if isinstance(output, Tensor) and output.numel() == followed[0].numel():
            self.weights[output] = True
        return False


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _observed_sdpa(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Call `scaled_dot_product_attention` and notify the listeners."""
    with without_listeners() as listeners:
        output = F.scaled_dot_product_attention(*args, **kwargs)
        if output.is_nested:
            notify_missed(listeners, is_nested=True)
            return output
        inputs = sdpa_inputs(*args, **kwargs)
        # the caller gets a view of the observed output, which so has a gradient
        seen = output.reshape(*inputs.query.shape[:3], output.shape[-1])
        notify(listeners, Seen("scaled_dot_product_attention", inputs, seen))
    return seen.view(output.shape)


def sdpa_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Inputs:
    """Return the arguments of torch's function as attnkit's, with four dimensions.

    Tensors of three dimensions are [batch, tokens, channels] with one head, with enable_gqa [heads,
    tokens, channels]. Of more than four dimensions those before the heads are joined to one batch.
    """
    ndim = max(query.ndim, key.ndim, value.ndim)
    tensors = [tensor[(None,) * (ndim - tensor.ndim)] for tensor in (query, key, value)]
    if ndim == 3 and not enable_gqa:
        tensors = [tensor.unsqueeze(1) for tensor in tensors]
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask.unsqueeze(1)
    tensors = [tensor[(None,) * (4 - tensor.ndim)] for tensor in tensors]
    batch = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
    heads = [tensor.shape[-3] for tensor in tensors]
    heads = [max(heads) if heads[0] == 1 else heads[0], *[max(heads[1:])] * 2]
    query, key, value = (
        tensor.expand(*batch, num_heads, -1, -1).flatten(0, -4)
        for tensor, num_heads in zip(tensors, heads, strict=True)
    )
    mask: Mask | Tensor | None = Causal("top_left") if is_causal else None
    bias = None
    if attn_mask is not None:
        if len(batch) > 1 and attn_mask.ndim > 3:
            attn_mask = attn_mask.expand(*batch, -1, -1, -1).flatten(0, -4)
        if attn_mask.dtype == torch.bool and not isinstance(attn_mask, CausalBias):
            mask = attn_mask if mask is None else mask & as_mask(attn_mask)
        else:
            bias = attn_mask
    return check_inputs(
        query, key, value, mask=mask, bias=bias, scale=scale, dropout_p=min(dropout_p, 0.999)
    )


def _observed_multi_head(args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Call `multi_head_attention_forward` and notify the listeners of its attention.

    It calls `scaled_dot_product_attention`, or multiplies itself if it returns weights.
    """
    num_heads = args[_NUM_HEADS] if len(args) > _NUM_HEADS else kwargs["num_heads"]
    with without_listeners() as listeners:
        with _Inside(num_heads) as inside:
            result = _body()(*args, **kwargs)
        if inside.seen is not None:
            notify(listeners, inside.seen)
    if len(inside.factors) == 2:
        note_kernel("math")  # records observe only the whole function, which `_body` replaces
    return result


def _body() -> FunctionType:
    """Return the function without its first lines, which would pass the call to the open modes."""
    whole: Any = F.multi_head_attention_forward
    names = {**whole.__globals__, "has_torch_function": lambda tensors: False}
    return FunctionType(whole.__code__, names, whole.__name__, whole.__defaults__)


class _Inside(TorchFunctionMode):
    """Mode that observes the attention inside the function: torch's SDPA, or two products."""

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
        elif func in (torch.bmm, torch.baddbmm):
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
        """Return [batch · heads, …] as [batch, heads, …]; a first dimension of 1 broadcasts."""
        return tensor[None] if len(tensor) == 1 else tensor.unflatten(0, (-1, self.num_heads))


class ComputedBy(TorchFunctionMode):
    """Mode that calls `attend` in the place of torch's `scaled_dot_product_attention`."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func, types, args=(), kwargs=None):
        is_attention = func is F.scaled_dot_product_attention
        return (self.attend if is_attention else func)(*args, **(kwargs or {}))


_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


def watch_interface() -> AbstractContextManager[None]:
    """Notify the listeners in the block of attention that transformers' interface computes."""
    return interface_handled(_observed)


def _observed(
    name: str,
    function: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None = None,
    *args: Any,
    **options: Any,
) -> tuple:
    """Call the function, which returns [batch, queries, heads, value_dim] and more, and notify the
    listeners."""
    given = module, query, key, value, attention_mask, *args
    is_packed = query.shape[2] == 1 and query.shape[1] != key.shape[1]
    # with one query "sdpa" may pass the heads to torch as queries
    is_torchs = name in ("sdpa", None) and not (is_packed and attention_mask is not None)
    if is_torchs or name == "attnkit" or not LISTENERS.get() or is_recomputed():
        return function(*given, **options)
    with without_listeners() as listeners:
        output, *rest = function(*given, **options)
        seen = output.transpose(1, 2)
        inputs = None if args else _inputs(*given, **options)
        if inputs is not None and _explains(inputs, seen):
            notify(listeners, Seen("transformers", inputs, seen))
            output = seen.transpose(1, 2)
        else:
            notify_missed(listeners)
    return output, *rest


def _inputs(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Inputs:
    """Return the arguments by their usual meaning; `_explains` checks it against the output."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask: Mask | Tensor | None = None
    bias = position_bias
    if isinstance(attention_mask, BlockMask):
        sizes = query.shape[0], query.shape[1], num_queries, num_keys
        mask = create_mask(attention_mask.mask_mod, *sizes, device=str(query.device))
    elif attention_mask is None:
        is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        mask = Causal("bottom_right") if is_causal and num_queries > 1 else None
    elif attention_mask.ndim == 2:
        mask = Padding(attention_mask.bool())
        if is_causal or getattr(module, "is_causal", False):
            mask = mask & Causal("bottom_right")
    elif attention_mask.dtype == torch.bool:
        mask = attention_mask[..., :num_keys]
    else:
        added = attention_mask[..., :num_keys]
        bias = added if bias is None else bias + added
    return check_inputs(
        query,
        key,
        value,
        score=ScaledDot(scale=scaling, softcap=softcap),
        mask=mask,
        bias=bias,
        dropout_p=dropout,
        sink=s_aux,
    )


def _explains(inputs: Inputs, output: Tensor) -> bool:
    """Return whether the output's first and last rows are A V; rows of padding may be 0."""
    if inputs.dropout_p:
        return True
    rows = [0, inputs.num_queries - 1]
    with torch.no_grad():
        weights = AttentionCall("", "", inputs, output).weights(rows)
        value = inputs.repeated_heads()[1].to(weights.dtype)
        expected = torch.einsum("bhik,bhkd->bhid", weights, value)
        actual = output[:, :, rows].to(weights.dtype)
        error = (actual - expected).abs().masked_fill(actual == 0, 0.0)
        largest = expected.abs().amax()
    return bool((error <= _TOLERANCE.get(inputs.query.dtype, 3e-2) * (1 + largest)).all())
