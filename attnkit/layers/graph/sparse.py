"""Sparse inputs: dropout, a linear layer and a choice of rows that touch the non-zeros only.

A bag of words is 1 % non-zero: on Cora's 2,708 × 1,433 features, dropout and the first product take
most of a dense training step.
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from attnkit.core.linear import linear


def sparse_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] of a sparse CSR matrix, again sparse CSR.

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
    """`torch.nn.Dropout` that also takes a sparse CSR matrix and draws for its non-zeros only.

    Each is 0 with probability p, else divided by 1 − p, which is the distribution of the dense
    matrix's dropout, since a zero stays one. The pattern of the non-zeros is kept.
    """

    def forward(
        self, input: Annotated[Tensor, "*nodes channels"]
    ) -> Annotated[Tensor, "*nodes channels"]:
        if input.layout != torch.sparse_csr:
            return super().forward(input)
        if not self.training or not self.p:
            return input
        return with_values(input, super().forward(input.values()))


class SparseLinear(nn.Linear):
    """`torch.nn.Linear` that also takes a sparse CSR matrix; equal parameters, equal output.

    Raises:
        ValueError: a sparse input requires a gradient, which would be dense.
    """

    def forward(
        self, input: Annotated[Tensor, "*nodes in_channels"]
    ) -> Annotated[Tensor, "*nodes out_channels"]:
        if input.layout == torch.sparse_csr and input.requires_grad:
            raise ValueError("x: expected features without a gradient; x.to_dense() can have one")
        return linear(input, self.weight, self.bias)
