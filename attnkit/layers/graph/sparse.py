"""Layers that take sparse inputs too: dropout and a linear layer that touch the non-zeros only.

A bag of words is 1 % non-zero: on Cora's 2,708 × 1,433 features, dropout and the first product take
most of a dense training step.
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from attnkit.core.operators.dropout import dropout
from attnkit.core.operators.sparse import linear, with_values


class SparseDropout(nn.Dropout):
    """`torch.nn.Dropout` that also takes a sparse CSR matrix and draws for its non-zeros only.

    Each is 0 with probability p, else divided by 1 − p, which is the distribution of the dense
    matrix's dropout, since a zero stays one. The pattern of the non-zeros is kept.
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
