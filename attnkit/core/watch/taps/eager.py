"""Attention that a model computes by a softmax and a product of its own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
PRODUCTS = {
    torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, Tensor.matmul, Tensor.bmm,
    Tensor.baddbmm, Tensor.__matmul__, Tensor.__rmatmul__,
}  # fmt: skip


class EagerAttention:
    """Finds products of a softmax with other activations.

    A softmax of three dimensions or more is followed through what keeps its number of elements, as
    dropout and another shape do.
    """

    def __init__(self) -> None:
        self.weights = WeakTensorKeyDictionary()

    def is_found(self, func: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> bool:
        """Whether this call of torch is such a product."""
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
