"""Attention rollout and relevance, propagated as a vector from the last layer to the first.

One output needs only one row of the product of all layers' matrices. This row is a vector that is
multiplied from the left, so no tokens × tokens matrix is stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Step:
    """A layer of attention between tokens.

    call: the `AttentionCall` that ran.
    rows: index of the token of each query, int [queries]; None: learned queries, which are no
        tokens.
    num_tokens: number of tokens of the layer's input; if there are fewer keys, they are the last.
    is_used: whether the layer takes part; otherwise relevance passes through it unchanged.
    """

    call: Any
    rows: Tensor | None
    num_tokens: int
    is_used: bool = True

    def kept(self, r: Tensor) -> Tensor:
        """Propagate relevance through the residual, [batch, queries] to [batch, tokens]."""
        tokens = r.new_zeros(len(r), self.num_tokens)
        return tokens if self.rows is None else tokens.index_add_(1, self.rows, r)

    def looked_at(self, r: Tensor, output_gradient: Tensor | None = None) -> Tensor:
        """Propagate relevance through the attention, [batch, queries] to [batch, tokens]."""
        moved = self.call.propagate(r, output_gradient=output_gradient)
        return torch.nn.functional.pad(moved, (self.num_tokens - moved.shape[1], 0))


def rollout(steps: Sequence[Step], start: Tensor) -> Tensor:
    """Attention rollout (Abnar and Zuidema, Quantifying Attention Flow in Transformers, 2020).

        r ← r (I + mean_h A_l) / 2        from the last layer down

    One half is the authors' assumption for the residual connection, not a measurement. A layer with
    learned queries has no residual connection to the tokens; there r ← r mean_h A_l.

    Args:
        steps: layers in the order in which they ran.
        start: [batch, queries of the last step], how much each is read, with the sum 1.

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

    The identity with which R starts is subtracted from the result, as in their (8). Nothing is
    normalized: values grow with depth and with y. A layer with learned queries has no residual
    connection to the tokens; there r ← r Ā_l, as in (11).

    Args:
        steps, start: as in `rollout`.
        output_gradients: ∂y/∂O of each step's attention output, [batch, heads, queries, value_dim].

    Returns:
        [batch, tokens] of the first step.
    """
    # kept apart, since the gain may be tiny compared with the identity
    identity, gained = start, torch.zeros_like(start)
    for step, gradient in zip(reversed(steps), reversed(output_gradients), strict=True):
        looked_at = step.looked_at(identity + gained, gradient) if step.is_used else 0.0
        identity, gained = step.kept(identity), step.kept(gained) + looked_at
    return gained
