"""Attention followed from the last layer to the first, one row of the product at a time.

The product of all layers' matrices is not needed for one output: its row is a vector, multiplied
from the left, so that nothing of tokens × tokens is held.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Step:
    """A layer of attention between tokens.

    call: what ran, an `AttentionCall`.
    rows: which token each query is, int [queries]; None: the queries are learned, and no token.
    num_tokens: of the layer's input; keys are the last of them, where there are fewer.
    is_used: whether the layer takes part; one that does not passes on what it is given.
    """

    call: Any
    rows: Tensor | None
    num_tokens: int
    is_used: bool = True

    def kept(self, r: Tensor) -> Tensor:
        """What the residual connection passes on, [batch, queries] -> [batch, tokens]."""
        tokens = r.new_zeros(len(r), self.num_tokens)
        return tokens if self.rows is None else tokens.index_add_(1, self.rows, r)

    def looked_at(self, r: Tensor, output_gradient: Tensor | None = None) -> Tensor:
        """What the attention passes on, [batch, queries] -> [batch, tokens]."""
        moved = self.call.propagate(r, output_gradient=output_gradient)
        return torch.nn.functional.pad(moved, (self.num_tokens - moved.shape[1], 0))


def rollout(steps: Sequence[Step], start: Tensor) -> Tensor:
    """Attention rollout (Abnar and Zuidema, Quantifying Attention Flow in Transformers, 2020).

        r ← r (I + mean_h A_l) / 2        from the last layer down

    One half is the authors' assumption for the residual connection, not a measurement. Where the
    queries of a layer are learned, which no residual connection carries back, r ← r mean_h A_l.

    Args:
        steps: in the order in which they ran.
        start: [batch, queries of the last step], what is read of its output, with the sum 1.

    Returns:
        [batch, tokens] of the first step, with the sum 1.
    """
    r = start
    for step in reversed(steps):
        if not step.is_used:
            r = step.kept(r)
        elif step.rows is None:
            r = step.looked_at(r)
        else:
            r = (step.kept(r) + step.looked_at(r)) / 2
    return r


def relevance(steps: Sequence[Step], start: Tensor, output_gradients: Sequence[Tensor]) -> Tensor:
    """Gradient-weighted relevance (Chefer, Gur and Wolf, Generic Attention-model Explainability for
    Interpreting Bi-Modal and Encoder-Decoder Transformers, 2021), one row of their R.

        r ← r + r Ā_l,   Ā_l = mean_h (∂y/∂A_l ⊙ A_l)⁺        (5), (6), from the last layer down

    The identity that R begins with is left out of what is returned, as in their (8). Nothing is
    normalized: values grow with depth and with y. Where the queries of a layer are learned, which
    no residual connection carries back, r ← r Ā_l, as in (11).

    Args:
        steps, start: as in `rollout`.
        output_gradients: ∂y/∂O of each step's attention output, [batch, heads, queries, value_dim].

    Returns:
        [batch, tokens] of the first step.
    """
    identity, gained = start, torch.zeros_like(start)  # apart, since what is gained may be tiny
    for step, gradient in zip(reversed(steps), reversed(output_gradients), strict=True):
        looked_at = step.looked_at(identity + gained, gradient) if step.is_used else 0.0
        identity, gained = step.kept(identity), step.kept(gained) + looked_at
    return gained
