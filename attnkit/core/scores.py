"""Scores: how well a query matches a key, and the one dict from names to them.

A score knows its definition, `scores(query, key)`, and, if there is one, the scaled dot product
that equals it inside a softmax, `as_dot(query, key)`, which the fused kernels then compute.
Parameters are per query head and act on the query, so that key heads may be shared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

__all__ = ["SCORES", "Dot", "ScaledDot", "Score", "as_score"]


class Score:
    """How well query i matches key j.

    Subclasses are frozen dataclasses; their tensors may require gradients.
    """

    softcap: float | None = None

    def check(self, query: Tensor, key: Tensor) -> None:
        """ValueError where the query's and key's head dimensions do not fit the score."""
        if key.shape[3] != query.shape[3]:
            raise ValueError(f"key: expected query's head_dim {query.shape[3]}, got {key.shape[3]}")

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """The definition: [batch, heads, queries, keys] of as many query as key heads."""
        raise NotImplementedError(f"{type(self).__name__} defines no scores()")

    def dot_dim(self, head_dim: int) -> int | None:
        """The head dimension of `as_dot`; None if the score is no dot product."""
        return None

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """Query, key and scale whose scaled dot product is this score, but for what depends on the
        query alone, which softmax does not see."""
        raise NotImplementedError(f"{type(self).__name__} is no dot product")

    def select(self, heads: Tensor) -> Score:
        """The score of some query heads only."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Score:
        """The same score with its tensors moved as by `Tensor.to`."""
        return self


@dataclass(frozen=True)
class ScaledDot(Score):
    """score(q, k) = scale · q·k (Vaswani et al., Attention Is All You Need, 2017).

    scale: None is 1/√head_dim.
    """

    scale: float | None = None

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return self.factor(query.shape[3]) * (query @ key.transpose(-2, -1))

    def dot_dim(self, head_dim: int) -> int:
        return head_dim

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        return query, key, self.factor(query.shape[3])

    def factor(self, head_dim: int) -> float:
        """The factor on q·k."""
        if self.scale is not None:
            return float(self.scale)
        return float(head_dim**-0.5) if head_dim else 1.0


def Dot() -> ScaledDot:
    """score(q, k) = q·k (Luong et al., Effective Approaches to Attention-based NMT, 2015)."""
    return ScaledDot(scale=1.0)


SCORES = {"scaled_dot": ScaledDot(), "dot": Dot()}


def as_score(score: str | Score, scale: float | None = None) -> Score:
    """The score of that name, with the caller's scale; ValueError lists the names there are."""
    if not isinstance(score, Score):
        if score not in SCORES:
            raise ValueError(f"score: expected one of {', '.join(SCORES)}, got {score!r}")
        found = SCORES[score]
        if scale is not None and score != "scaled_dot":
            raise ValueError(
                f"scale: the score {score!r} has no scale, got {scale}; use score='scaled_dot'"
            )
        score = found
    if scale is None:
        return score
    if not isinstance(score, ScaledDot) or score.scale is not None:
        raise ValueError(f"scale: only for the score 'scaled_dot', got {scale} with {score}")
    return replace(score, scale=float(scale))
