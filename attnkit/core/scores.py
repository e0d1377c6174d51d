"""Scores: how well a query matches a key, and the one dict from names to them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SCORES", "Score", "as_score"]


@dataclass(frozen=True)
class Score:
    """A score that is a scaled dot product, score(q, k) = scale · q·k.

    `scale_exponent` gives the default scale, head_dim ** scale_exponent.
    """

    name: str
    scale_exponent: float
    takes_scale: bool

    def scale(self, scale: float | None, head_dim: int) -> float:
        """The factor on q·k, the caller's where the score takes one."""
        if scale is None:
            return float(head_dim**self.scale_exponent) if head_dim else 1.0
        if not self.takes_scale:
            raise ValueError(
                f"scale: the score {self.name!r} has no scale, got {scale}; use score='scaled_dot'"
            )
        return float(scale)


SCORES = {
    # Vaswani et al., Attention Is All You Need (2017)
    "scaled_dot": Score("scaled_dot", scale_exponent=-0.5, takes_scale=True),
    # Luong et al., Effective Approaches to Attention-based Neural Machine Translation (2015)
    "dot": Score("dot", scale_exponent=0.0, takes_scale=False),
}


def as_score(score: str | Score) -> Score:
    """The score of that name; ValueError lists the names there are."""
    if isinstance(score, Score):
        return score
    if score in SCORES:
        return SCORES[score]
    raise ValueError(f"score: expected one of {', '.join(SCORES)}, got {score!r}")
