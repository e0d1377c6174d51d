"""The cost of a module in multiply-adds."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import attnkit.core.scores.additive  # noqa: F401  registers its operator
from attnkit.core.contexts import dispatch_flags_kept, shared, uncompiled
from attnkit.core.kernels.base import by_operators
from attnkit.core.running import undisturbed


def count_multiply_adds(module: Callable[..., Any], *inputs: Any, **options: Any) -> int:
    """Count the multiply-adds of `module(*inputs, **options)`: products whose results are summed.

    A linear layer on n tokens has n · in · out, a convolution one for each weight and output
    position, attention of n queries and m keys n · m · (head_dim + value_dim) for each head, and
    attention over E edges E · (head_dim + value_dim), plus E for the sum of the weights. Additions
    of biases, norms, activations, the softmax, the products of a gate with its map, recurrent
    layers and `nn.Bilinear` are not counted.

    The count is of what really runs: a window includes what its blocks compute beyond its edges,
    and a mask that a kernel applies to computed scores, or any mask in FlexAttention, costs as much
    as no mask. torch cannot count Triton kernels for edges; torch's operators run in their place.

    The count is half that of `torch.utils.flop_counter`, plus what torch leaves out: sampled and
    sparse products, weighted sums of rows, products with vectors, the additive score, and torch's
    `MultiheadAttention` and `TransformerEncoderLayer` in evaluation, whose fast path torch counts
    as 0.

    Args:
        module: a module, which runs once in evaluation mode without gradients; its modes and
            buffers and the random state are restored. Compiled code runs uncompiled. A function is
            called as it is.
        inputs, options: the arguments of the call.
    """
    module = getattr(module, "_orig_mod", module)  # the module that torch.compile wrapped
    with ExitStack() as stack:
        if isinstance(module, nn.Module):
            stack.enter_context(undisturbed(module))
        stack.enter_context(torch.no_grad())
        stack.enter_context(uncompiled())
        stack.enter_context(by_operators())
        stack.enter_context(shared("torch's fast path", _without_fast_path))
        stack.enter_context(dispatch_flags_kept())
        counter = FlopCounterMode(display=False, custom_mapping=_formulas())
        # torch's tracker reads the gradient function of an expanded parameter; there is none here
        counter.mod_tracker = _NoModules()  # type: ignore[assignment]
        stack.enter_context(counter)
        module(*inputs, **options)
    return counter.get_total_flops() // 2


class _NoModules(nullcontext):
    """A module tracker for torch's counter that does not distinguish modules."""

    parents = ("Global",)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    mha = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(before)


def _formulas() -> dict[Any, Any]:
    """Return formulas of FLOPs, two per multiply-add, for operators that torch does not count."""
    aten = torch.ops.aten
    return {
        aten.mm: _raw(lambda a, b, **_: _product(a, b)),
        aten.addmm: _raw(lambda _, a, b, **__: _product(a, b)),
        aten._sparse_addmm: _raw(lambda _, a, b, **__: _product(a, b)),
        aten._sparse_mm: _raw(lambda a, b, *_, **__: _product(a, b)),
        aten._sparse_mm_reduce_impl: _raw(lambda a, b, *_, **__: _product(a, b)),
        aten.sparse_sampled_addmm: _raw(lambda out, a, _, **__: 2 * _nonzeros(out) * a.shape[-1]),
        aten._embedding_bag: _raw(_bag),
        aten._embedding_bag_forward_only: _raw(_bag),
        aten.mv: _raw(lambda a, b, **_: _product(a, b[:, None])),
        aten.addmv: _raw(lambda _, a, b, **__: _product(a, b[:, None])),
        aten.dot: _raw(lambda a, _, **__: 2 * a.numel()),
        aten.linalg_solve_triangular: _raw(_solve),
        aten._scaled_dot_product_flash_attention_for_cpu: _raw(
            lambda q, k, v, *_, **__: 2 * q[..., 0].numel() * k.shape[2] * (q.shape[3] + v.shape[3])
        ),
        torch.ops.attnkit.additive_scores: _raw(
            lambda q, k, *_, **__: 2 * q.shape[0] * q.shape[1] * k.shape[1] * q.shape[2]
        ),
    }


def _raw(formula: Callable[..., int]) -> Callable[..., int]:
    """Mark a formula as torch marks those that are given tensors and not only their shapes."""

    def count(*args: Any, out_val: Any = None, out: Any = None, **kwargs: Any) -> int:
        return formula(*args, **kwargs)

    count._get_raw = True  # type: ignore[attr-defined]
    return count


def _nonzeros(tensor: Tensor) -> int:
    return tensor.numel() if tensor.layout is torch.strided else tensor._nnz()


def _product(a: Tensor, b: Tensor) -> int:
    if a.layout is torch.strided and b.layout is not torch.strided:
        return 2 * _nonzeros(b) * a.shape[0]
    return 2 * _nonzeros(a) * b.shape[1]


def _bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> int:
    # without weights there are only additions
    return 0 if per_sample_weights is None else 2 * indices.numel() * weight.shape[1]


def _solve(a: Tensor, b: Tensor, **kwargs: Any) -> int:
    """Return the FLOPs of solving by substitution."""
    size = a.shape[-1]
    batch = prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    return batch * size * (size - 1) * b.shape[-1]
