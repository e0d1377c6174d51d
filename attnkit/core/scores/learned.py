"""Scores with learned parameters: modules whose `forward()` returns the current Score."""

from math import log
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from attnkit.core.arguments import positive
from attnkit.core.scores.additive import Activation, Additive
from attnkit.core.scores.kinds import SCORES, Cosine, Gaussian, General, Score

ScoreName = Literal["scaled_dot", "dot", "cosine", "gaussian", "general", "additive"]
SCORE_NAMES: tuple[ScoreName, ...] = get_args(ScoreName)
"""The names that a block's `score` may have: those of `SCORES`, and those of learned scores."""


class GeneralScore(nn.Module):
    """`General` with a learned weight per head, [num_heads, head_dim, head_dim].

    The weight is initially the identity / √head_dim, which gives the scaled dot product.
    """

    def __init__(self, num_heads: int, head_dim: int, *, softcap: float | None = None) -> None:
        super().__init__()
        self.softcap = softcap
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to that of the scaled dot product."""
        head_dim = self.weight.shape[-1]
        with torch.no_grad():
            self.weight.copy_(torch.eye(head_dim) / head_dim**0.5)

    def forward(self) -> General:
        return General(weight=self.weight, softcap=self.softcap)


class AdditiveScore(nn.Module):
    """`Additive` with a learned vector per head, [num_heads, head_dim]: Bahdanau's score in a block
    whose query and key projections are its W_q and W_k; the score of GATv2 with "leaky_relu".

    The vectors are initially uniform within ±√(6 / (head_dim + 1)), Xavier's bound.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        activation: Activation = "tanh",
        negative_slope: float | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.negative_slope = negative_slope
        self.softcap = softcap
        self.vector = nn.Parameter(torch.empty(num_heads, head_dim))
        self.reset_parameters()
        self()  # raises for wrong options now rather than in the first forward

    def reset_parameters(self) -> None:
        """Initialize the vectors Xavier-uniform, each as a projection to one number."""
        bound = (6 / (self.vector.shape[-1] + 1)) ** 0.5
        nn.init.uniform_(self.vector, -bound, bound)

    def forward(self) -> Additive:
        return Additive(
            self.vector,
            activation=self.activation,  # a keyword, since torch 2.11 cannot compile a positional
            negative_slope=self.negative_slope,
            softcap=self.softcap,
        )


class CosineScore(nn.Module):
    """`Cosine` with a learned temperature per head, exp(log_temperature [num_heads]).

    The temperature is initially 0.1, as in Swin Transformer V2 (Liu et al. 2022), which also bounds
    it below by 0.01; here it has no bound.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        initial_temperature: float = 0.1,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        positive(initial_temperature=initial_temperature)
        self.initial_temperature = initial_temperature
        self.softcap = softcap
        self.log_temperature = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every head to the initial temperature."""
        nn.init.constant_(self.log_temperature, log(self.initial_temperature))

    def forward(self) -> Cosine:
        return Cosine(temperature=self.log_temperature.exp(), softcap=self.softcap)


class GaussianScore(nn.Module):
    """`Gaussian` with a learned bandwidth per head, exp(log_bandwidth [num_heads]).

    The bandwidth is by default initially head_dim^¼, which weighs q·k as the scaled dot product
    does.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        initial_bandwidth: float | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        positive(initial_bandwidth=initial_bandwidth)
        self.initial_bandwidth = initial_bandwidth or head_dim**0.25
        self.softcap = softcap
        self.log_bandwidth = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every head to the initial bandwidth."""
        nn.init.constant_(self.log_bandwidth, log(self.initial_bandwidth))

    def forward(self) -> Gaussian:
        return Gaussian(bandwidth=self.log_bandwidth.exp(), softcap=self.softcap)


LEARNED_SCORES: dict[str, type[nn.Module]] = {
    "general": GeneralScore,
    "additive": AdditiveScore,
    "cosine": CosineScore,
    "gaussian": GaussianScore,
}


def learned_score(
    score: str | Score | nn.Module, num_heads: int, head_dim: int
) -> Score | nn.Module:
    """Return what a block keeps for its argument `score`: a module if the score has parameters."""
    if isinstance(score, nn.Module):
        return score
    if isinstance(score, Score):
        owned = [name for name, value in vars(score).items() if isinstance(value, Tensor)]
        if owned:
            learned = f"{type(score).__name__}Score"
            known = [kind.__name__ for kind in LEARNED_SCORES.values()]
            hint = f", such as attnkit.learned_scores.{learned}" if learned in known else ""
            raise ValueError(
                f"score: the tensor {owned[0]} of {score} would not be a parameter of the block; "
                f"give a module whose forward() returns the score{hint}"
            )
        return score
    if score in LEARNED_SCORES:
        return LEARNED_SCORES[score](num_heads, head_dim)
    if score not in SCORES:
        names = ", ".join(SCORE_NAMES)
        raise ValueError(f"score: expected one of {names}, a Score or a module, got {score!r}")
    return SCORES[score]
