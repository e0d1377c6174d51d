"""Attention by any score in blocks of queries, so that queries × keys memory is never taken."""

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional as F

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import Backend, empty_reasons
from attnkit.core.kernels.recompute import in_blocks
from attnkit.core.normalizers import masked_scores, revived, softmax


class Blockwise(Backend):
    """Any score in blocks of queries; the backward computes all but a few again: no queries × keys
    memory.

    Computed in float32 (float64 if the inputs are).
    """

    name = "blockwise"
    has_all_derivatives = True
    has_sink = True

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        return empty_reasons(inputs)

    def compute(self, inputs: Inputs) -> Tensor:
        (output,) = in_blocks(inputs, _attend, skips=True)
        return output.to(inputs.query.dtype)


def _attend(block: Inputs, allowed: Tensor | None) -> tuple[Tensor]:
    scores = masked_scores(block, allowed)
    if block.sink is not None:
        return (F.dropout(softmax(scores, block.sink), block.dropout_p) @ block.value,)
    scores, dead = revived(scores)
    weights = F.dropout(scores.softmax(dim=-1), block.dropout_p)
    return ((weights @ block.value).masked_fill(dead, 0.0),)
