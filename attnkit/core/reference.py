"""The definition of attention, written plainly; every kernel is held against it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.inputs import Inputs, in_high_precision

__all__ = ["reference_attention"]


def reference_attention(inputs: Inputs) -> Tensor:
    """output_i = Σ_j dropout(normalizer_j(score(q_i, k_j) + bias_ij)) · v_j, j where the mask
    allows.

    Computed in float32 (float64 if the inputs are), returned in the dtype of the inputs.
    """
    exact = in_high_precision(inputs)
    key, value = exact.repeated_heads()
    exact = replace(exact, key=key, value=value)
    with torch.autocast(inputs.query.device.type, enabled=False):
        weights = exact.normalizer.weights(exact, exact.dense_mask())
        output = F.dropout(weights, exact.dropout_p) @ value
    return output.to(inputs.query.dtype)
