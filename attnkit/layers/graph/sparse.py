"""Dropout and a linear layer that also take sparse inputs and then read only their non-zeros.

A bag of words is 1 % non-zero: on Cora's 2,708 × 1,433 features, dropout and the first matrix
product take most of a dense training step.
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from attnkit.core.operators.cpu import dropout
from attnkit.core.operators.sparse import linear, with_values


class SparseDropout(nn.Dropout):
    """`torch.nn.Dropout` that also takes a sparse CSR matrix and draws for its non-zeros only.

    A non-zero becomes 0 with probability p and is divided by 1 − p otherwise. This has the same
    distribution as dropout of the dense matrix, whose zeros stay 0. The sparsity pattern is kept.
    """

    def forward(
        self, input: Annotated[Tensor, "*nodes channels"]
    ) -> Annotated[Tensor, "*nodes channels"]:
        if not self.training or not self.p:
            return input
        if input.layout != torch.sparse_csr:
            return dropout(input, self.p)
        return with_values(input, dropout(input.values(), self.p))


class SparseLinear(nn.Linear):
    """`torch.nn.Linear` that also takes a sparse CSR matrix, with the same parameters and output.

    Raises:
        ValueError: a sparse input requires a gradient, which would be dense.
    """

    def forward(
        self, input: Annotated[Tensor, "*nodes in_channels"]
    ) -> Annotated[Tensor, "*nodes out_channels"]:
        if input.layout == torch.sparse_csr and input.requires_grad:
            raise ValueError(
                "x: expected sparse features without requires_grad, got requires_grad=True; "
                "pass x.to_dense()"
            )
        return linear(input, self.weight, self.bias)
