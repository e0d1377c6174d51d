"""A sink beside the keys, by what a fused kernel knows of its softmax:

    lse' = log(e^lse + e^sink),   output' = output · e^(lse − lse') = output · σ(lse − sink)

A fused backward that is given output' and lse' in the place of its own gives exactly the gradients
of query, key and value; that of the sink is −Σ_i e^(sink − lse'_i) (gradient_i · output'_i).
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.inputs import Inputs
from attnkit.core.precision import cast_bias


def add_sink_(output: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Write output' [..., rows, channels] over the output; returns lse' [..., rows, 1], for a sink
    [..., 1, 1]."""
    output.mul_(torch.sigmoid(lse - sink))
    return torch.logaddexp(lse, sink)


def sink_gradient(sink: Tensor, lse: Tensor, *pairs: tuple[Tensor, Tensor | None]) -> Tensor:
    """Of outputs' with their gradients, [..., rows, channels], where None is 0, and lse'."""
    products = [
        (output * gradient).sum(dim=-1, keepdim=True, dtype=lse.dtype)
        for output, gradient in pairs
        if gradient is not None
    ]
    share = (sink - lse).exp()
    return -(share * sum(products)).sum_to_size(sink.shape)


def sink_as_key(inputs: Inputs) -> Inputs:
    """The same attention by one more key of zeros: the sink is its bias, and its value is 0.

    The score is a scaled dot product; mask and bias become one tensor of biases.
    """
    assert inputs.sink is not None
    bias = inputs.query.new_zeros(1, 1, 1, 1) if inputs.bias is None else inputs.bias
    term = replace(inputs, bias=bias).attn_mask()
    assert term is not None
    sink = cast_bias(inputs.sink, term.dtype)[None, :, None, None]
    rows = torch.broadcast_shapes(term.shape[:3], sink.shape[:3])
    term = torch.cat([term.expand(*rows, inputs.num_keys), sink.expand(*rows, 1)], dim=3)
    key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (inputs.key, inputs.value))
    return replace(inputs, key=key, value=value, mask=None, bias=term, sink=None)
