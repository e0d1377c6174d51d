"""Sparse inputs: dropout, a linear map and a choice of rows that touch the non-zeros only.

A bag of words is 1 % non-zero: on Cora's 2,708 × 1,433 features, dropout and the first product take
most of a dense training step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def sparse_dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Dropout of a sparse matrix: each non-zero is 0 with probability p, else divided by 1 − p.

    The same distribution as `torch.nn.functional.dropout` of the dense matrix, since a zero stays
    one either way. The pattern of the non-zeros is kept.

    Args:
        x: [rows, columns], sparse CSR.
        p: in [0, 1].
        training: False returns `x`.

    Raises:
        TypeError: `x` is not sparse CSR.
    """
    _check_csr(x)
    if not training or not p:
        return x
    return with_values(x, F.dropout(x.values(), p))


def sparse_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b of a sparse matrix, as `torch.nn.functional.linear`; the gradients are exact.

    Args:
        x: [rows, in_features], sparse CSR; data, without a gradient.
        weight: [out_features, in_features], dense.
        bias: [out_features].

    Returns:
        Dense [rows, out_features].

    Raises:
        TypeError: `x` is not sparse CSR.
        ValueError: `x` requires a gradient, which would be dense.
    """
    _check_csr(x)
    if x.requires_grad:
        raise ValueError("x: expected features without a gradient; x.to_dense() can have one")
    # torch has no such product in half precision
    with torch.autocast(x.device.type, enabled=False):
        product = torch.sparse.mm(x, weight.t())
    return product if bias is None else product + bias


def sparse_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] of a sparse CSR matrix, again sparse CSR.

    Args:
        x: [all rows, columns], sparse CSR.
        rows: int64 [rows], in any order, repeats allowed.

    Raises:
        TypeError: `x` is not sparse CSR.
    """
    _check_csr(x)
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
    """The numbers starts[i], starts[i] + 1, …, counts[i] of them, for one i after the other."""
    before = counts.cumsum(0) - counts
    total = int(counts.sum())
    steps = torch.repeat_interleave(starts - before, counts, output_size=total)
    return steps + torch.arange(total, device=starts.device)


def offsets(counts: Tensor) -> Tensor:
    """Where each of consecutive groups of these sizes starts, and where the last one ends."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def with_values(x: Tensor, values: Tensor) -> Tensor:
    """A sparse CSR matrix with the pattern of `x` and these values."""
    return torch.sparse_csr_tensor(
        x.crow_indices(), x.col_indices(), values, x.shape, check_invariants=False
    )


class SparseDropout(nn.Dropout):
    """`torch.nn.Dropout` that also takes a sparse CSR matrix, of which it sees the non-zeros only.

    >>> dropout = SparseDropout(0.6)
    >>> dropout(features), dropout(features.to_sparse_csr())
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.layout == torch.sparse_csr:
            return sparse_dropout(input, self.p, self.training)
        return super().forward(input)


class SparseLinear(nn.Linear):
    """`torch.nn.Linear` that also takes a sparse CSR matrix; equal parameters, equal output."""

    def forward(self, input: Tensor) -> Tensor:
        if input.layout == torch.sparse_csr:
            return sparse_linear(input, self.weight, self.bias)
        return super().forward(input)


def _check_csr(x: Tensor) -> None:
    if x.layout != torch.sparse_csr:
        raise TypeError(f"x: expected a sparse CSR matrix, got {x.layout}; x.to_sparse_csr()")
