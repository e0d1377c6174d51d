"""Products with a sparse matrix of features, such as bags of words, on a CPU.

torch transposes the matrix again in every backward and multiplies with MKL, at a third of the speed
of bags of rows. Here the order of the columns is computed once for a matrix and kept with it.

A layer that reads node features is called as usual, inside the context `products_of`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from attnkit.core.kernels.edges.scores import sum_edges, sum_edges_by_source
from attnkit.core.masks.adjacency import Adjacency
from attnkit.core.operators.cpu import is_plain
from attnkit.core.operators.precision import no_autocast

_PATTERNS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def with_values(x: Tensor, values: Tensor) -> Tensor:
    """Return a sparse CSR matrix with the pattern of `x` and these values."""
    matrix = torch.sparse_csr_tensor(
        x.crow_indices(), x.col_indices(), values, x.shape, check_invariants=False
    )
    if is_plain(x):
        _PATTERNS[matrix] = _pattern(x)
    return matrix


def chosen_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows] of a dense or sparse CSR matrix."""
    return x.index_select(0, rows) if x.layout == torch.strided else sparse_rows(x, rows)


def sparse_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows] of a sparse CSR matrix, again as sparse CSR.

    Args:
        x: [all rows, columns], sparse CSR.
        rows: int64 [rows], in any order, repeats allowed.

    Raises:
        TypeError: `x` is not sparse CSR.
    """
    if x.layout != torch.sparse_csr:
        raise TypeError(f"x: expected a sparse CSR matrix, got {x.layout}; x.to_sparse_csr()")
    starts = x.crow_indices()
    counts = starts.diff()[rows]
    entries = ranges(starts[rows], counts)
    return torch.sparse_csr_tensor(
        offsets(counts),
        x.col_indices()[entries],
        x.values()[entries],
        (len(rows), x.shape[1]),
        check_invariants=False,
    )


def ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """Concatenate the ranges starts[i] … starts[i] + counts[i] − 1."""
    before = counts.cumsum(0) - counts
    total = int(counts.sum())
    steps = torch.repeat_interleave(starts - before, counts, output_size=total)
    return steps + torch.arange(total, device=starts.device)


def offsets(counts: Tensor) -> Tensor:
    """Return where consecutive groups of these sizes start, and where the last one ends."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def first_rows(x: Tensor, count: int) -> Tensor:
    """Return x[:count] of a dense or sparse CSR matrix."""
    if x.layout != torch.sparse_csr:
        return x[:count]
    if not is_plain(x):
        return sparse_rows(x, torch.arange(count, device=x.device))
    pattern = _pattern(x).first(count)
    end = pattern.num_edges
    rows = torch.sparse_csr_tensor(
        x.crow_indices()[: count + 1],
        x.col_indices()[:end],
        x.values()[:end],
        (count, x.shape[1]),
        check_invariants=False,
    )
    _PATTERNS[rows] = pattern
    return rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear`, also for sparse CSR `x` under autocast, where torch
    fails: it multiplies a sparse matrix in full precision only."""
    if x.layout is torch.strided:
        return F.linear(x, weight, bias)
    with no_autocast(x):
        weight = weight.to(x.dtype)
        if not serves(x, weight):
            return F.linear(x, weight, bias)
        output = product(x, weight.T)
        return output if bias is None else output + bias


def products_of(*nodes: Tensor) -> AbstractContextManager:
    """Return a context in which all calls of `F.linear`, such as those of `torch.nn.Linear`, use
    `linear` of this module if some of these node features are sparse."""
    is_dense = all(x.layout is torch.strided for x in nodes)
    return nullcontext() if is_dense or torch.compiler.is_compiling() else _SparseProducts()


class _SparseProducts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (linear if func is F.linear else func)(*args, **(kwargs or {}))


def serves(x: Tensor, table: Tensor) -> bool:
    """Return whether `product` supports these tensors; torch multiplies others."""
    return (
        x.layout == torch.sparse_csr
        and is_plain(x, table)
        and not x.requires_grad
        and x.dtype == table.dtype
        and x.dtype in (torch.float32, torch.float64)
    )


def product(x: Tensor, table: Tensor) -> Tensor:
    """Compute x @ table of a sparse CSR matrix and a dense one."""
    return _Product.apply(_pattern(x), x.values(), table, False)


def _pattern(x: Tensor) -> Adjacency:
    """Return the non-zeros as edges from columns to rows."""
    pattern = _PATTERNS.get(x)
    if pattern is None:
        with torch.inference_mode(False):  # kept, and training may read it later
            starts = x.crow_indices()
            rows = torch.repeat_interleave(starts.diff())
            pattern = Adjacency.of(torch.stack([x.col_indices(), rows]), *x.shape)
        _PATTERNS[x] = pattern
    return pattern


class _Product(torch.autograd.Function):
    """The product of the matrix, or of its transpose if `is_transposed`, with a table. The gradient
    is the product with the other of the two."""

    @staticmethod
    def forward(
        ctx: Any, pattern: Adjacency, values: Tensor, table: Tensor, is_transposed: bool
    ) -> Tensor:
        ctx.pattern, ctx.is_transposed = pattern, is_transposed
        ctx.save_for_backward(values)
        table = table.contiguous()
        if is_transposed:
            return sum_edges_by_source(pattern, values.index_select(0, pattern.by_source), table)
        return sum_edges(pattern, values, table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (values,) = ctx.saved_tensors
        return (
            None,
            None,
            _Product.apply(ctx.pattern, values, gradient, not ctx.is_transposed),
            None,
        )
