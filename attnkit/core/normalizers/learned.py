"""Normalizers with parameters of their own: modules from the keys' tokens to the Normalizer."""

from collections.abc import Callable
from typing import Annotated

from torch import Tensor, nn

from attnkit.core.inputs import Normalizer
from attnkit.core.normalizers.kinds import NORMALIZERS, DeltaRule, as_normalizer


class LearnedDeltaRule(nn.Module):
    """`DeltaRule` with β = sigmoid(W x + b) of each token x, one for each head.

    Begins near β = ½, with W Xavier-uniform and b = 0.
    """

    def __init__(self, num_heads: int, key_dim: int) -> None:
        super().__init__()
        self.beta_proj = nn.Linear(key_dim, num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform; bias 0."""
        nn.init.xavier_uniform_(self.beta_proj.weight)
        nn.init.zeros_(self.beta_proj.bias)

    def forward(self, tokens: Annotated[Tensor, "batch keys key_dim"]) -> DeltaRule:
        """The normalizer for the keys of `tokens`."""
        return DeltaRule(self.beta_proj(tokens).sigmoid().transpose(1, 2))


LEARNED_NORMALIZERS: dict[str, Callable[[int, int], nn.Module]] = {"delta_rule": LearnedDeltaRule}


def learned_normalizer(
    normalizer: str | Normalizer | nn.Module, num_heads: int, key_dim: int
) -> Normalizer | nn.Module:
    """What a block keeps for its argument `normalizer`: a module where there is something to
    learn."""
    if isinstance(normalizer, nn.Module):
        return normalizer
    if isinstance(normalizer, DeltaRule):
        raise ValueError(
            "normalizer: the beta of DeltaRule belongs to one input; give 'delta_rule', or a "
            "module whose forward(tokens) returns it"
        )
    if isinstance(normalizer, str):
        if normalizer in LEARNED_NORMALIZERS:
            return LEARNED_NORMALIZERS[normalizer](num_heads, key_dim)
        if normalizer not in NORMALIZERS:
            names = ", ".join([*NORMALIZERS, *LEARNED_NORMALIZERS])
            raise ValueError(
                f"normalizer: expected one of {names}, a Normalizer or a module, got {normalizer!r}"
            )
    return as_normalizer(normalizer)
