"""The definition of attention, written plainly; every kernel is held against it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.inputs import Inputs, in_high_precision

__all__ = ["reference_attention", "softmax"]


def reference_attention(inputs: Inputs) -> Tensor:
    """output_i = Σ_j dropout(softmax_j(score(q_i, k_j) + bias_ij)) · v_j, j where the mask allows.

    Computed in float32 (float64 if the inputs are), returned in the dtype of the inputs.
    """
    exact = in_high_precision(inputs)
    key, value = exact.repeated_heads()
    with torch.autocast(inputs.query.device.type, enabled=False):
        scores = exact.score.scores(exact.query, key)
        if exact.bias is not None:
            scores = scores + exact.bias
        weights = softmax(scores, exact.dense_mask())
        output = F.dropout(weights, exact.dropout_p) @ value
    return output.to(inputs.query.dtype)


def softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """softmax over the last dimension, over the allowed entries only.

    A row with no entry to look at (none allowed, or all scores −inf) is exactly 0, and so is its
    gradient.
    """
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if scores.shape[-1] == 0:
        return scores
    largest = scores.detach().amax(dim=-1, keepdim=True)
    # any finite number does for a row of −inf: its exponentials are 0 all the same
    exponentials = (scores - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
    total = exponentials.sum(dim=-1, keepdim=True)
    return exponentials / total.masked_fill(total == 0, 1.0)
