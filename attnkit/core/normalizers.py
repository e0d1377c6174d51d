"""Normalizers: how the scores of a query become the weights of its keys, and the dict of names.

A normalizer has a definition, `weights(inputs, allowed)`; the kernels compute the same without
holding all weights. A normalizer with learned parameters is the output of a module that is given
the keys' tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from attnkit.core.arguments import choice, floating, positive
from attnkit.core.masks.kept import has_values
from attnkit.core.masks.sequences import Causal, Padding
from attnkit.core.scores.kinds import ScaledDot, moved

if TYPE_CHECKING:
    from attnkit.core.inputs import Inputs  # imports this module for its field `normalizer`

__all__ = [
    "NORMALIZERS",
    "DeltaRule",
    "Hard",
    "LearnedDeltaRule",
    "Linear",
    "Normalizer",
    "Softmax",
    "as_normalizer",
    "masked_scores",
    "softmax",
]

Estimator = Literal["straight_through", "score_function"]
FeatureMap = Literal["elu", "relu", "sigmoid"]


@dataclass(frozen=True, eq=False)
class Normalizer:
    """Base class of normalizers, which turn scores to weights. Subclasses are frozen
    dataclasses."""

    @property
    def draws(self) -> bool:
        """Whether weights are drawn at random, so that calls differ."""
        return False

    def check(self, inputs: Inputs) -> None:
        """Raise ValueError or TypeError if the other arguments of `attend` do not fit."""

    def weights(
        self,
        inputs: Inputs,
        allowed: Annotated[Tensor, "#batch #heads #queries #keys", bool] | None,
    ) -> Annotated[Tensor, "batch heads queries keys"]:
        """Compute the weights of the query rows in `inputs`; this is the definition.

        Args:
            inputs: in high precision, with equally many key and query heads; the bias of these
                rows.
            allowed: the mask of these rows; None: everything is allowed.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no weights()")

    def evaluated(self) -> Normalizer:
        """Return the normalizer that a module uses in evaluation."""
        return self

    def select(self, heads: Annotated[Tensor, "chosen_heads", int]) -> Normalizer:
        """Return the normalizer of the given query heads only."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Normalizer:
        """Return the same normalizer with its tensors moved as by `Tensor.to`."""
        return moved(self, *args, **kwargs)

    def __str__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class Softmax(Normalizer):
    """weight_ij = exp(score_ij) / Σ_j exp(score_ij), with exp(sink) in the sum if there is one."""

    def weights(self, inputs: Inputs, allowed: Tensor | None) -> Tensor:
        return softmax(masked_scores(inputs, allowed), inputs.sink)


@dataclass(frozen=True)
class Hard(Normalizer):
    """Hard attention: all weight on one key, drawn from the softmax of the scores, or the best one.

        index_i ~ softmax_j(score_ij),   weight_ij = [j = index_i]

    A draw has no gradient; the scores are trained by an estimator:

    | estimator            | gradient of the scores                                              |
    |----------------------|---------------------------------------------------------------------|
    | `"straight_through"` | that of softmax((score + Gumbel noise) / temperature), biased (Jang |
    |                      | et al. 2017; Maddison et al. 2017)                                  |
    | `"score_function"`   | none by itself; the loss has the log-probability of what was drawn, |
    |                      | from `attnkit.record_draws` (REINFORCE, Williams 1992; as in Show,  |
    |                      | Attend and Tell, Xu et al. 2015)                                    |
    | `None`               | none; the key with the best score, the first of equals              |

    Modules in evaluation mode use `Hard(None)`. With an estimator, `attention_weights` returns the
    probabilities with which keys are drawn.
    """

    estimator: Estimator | None = "straight_through"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        choice((*get_args(Estimator), None), estimator=self.estimator)
        positive(temperature=self.temperature)
        if self.temperature != 1 and self.estimator != "straight_through":
            raise ValueError(
                f"temperature: only 'straight_through' has one, got {self.temperature} "
                f"with the estimator {self.estimator!r}"
            )

    @property
    def draws(self) -> bool:
        return self.estimator is not None

    def weights(self, inputs: Inputs, allowed: Tensor | None) -> Tensor:
        scores = masked_scores(inputs, allowed)
        if self.draws:
            return softmax(scores)
        if scores.shape[-1] == 0:
            return scores
        best, index = scores.max(dim=-1, keepdim=True)
        weights = torch.zeros_like(scores).scatter(-1, index, 1.0)
        return weights.masked_fill(best == -torch.inf, 0.0)

    def evaluated(self) -> Hard:
        return Hard(None)


@dataclass(frozen=True)
class Linear(Normalizer):
    """Linear attention: weight_ij = φ(q_i)·φ(k_j) / Σ_j φ(q_i)·φ(k_j) over the allowed j, in time
    and memory linear in the tokens (Katharopoulos et al., Transformers are RNNs, 2020).

    There is no exponential, and the only score is φ(q)·φ(k). If all weights of a query are 0, its
    output is 0.

    feature_map: φ. "elu" is elu(x) + 1, as published; "relu" is max(x, 0); "sigmoid" is the
        logistic function, as in Polynormer (Deng et al., 2024).
    """

    feature_map: FeatureMap = "elu"

    def __post_init__(self) -> None:
        choice(get_args(FeatureMap), feature_map=self.feature_map)

    def check(self, inputs: Inputs) -> None:
        _check_plain(inputs, "linear attention weighs by φ(q)·φ(k)")

    def features(
        self, tokens: Annotated[Tensor, "batch heads tokens head_dim"]
    ) -> Annotated[Tensor, "batch heads tokens head_dim"]:
        """Return φ of the tokens, nowhere negative."""
        if self.feature_map == "sigmoid":
            return tokens.sigmoid()
        above_zero = F.relu(tokens)
        if self.feature_map == "relu":
            return above_zero
        # e^x where x < 0, because elu(x) + 1 = (e^x − 1) + 1 rounds to 0 for x < −17 in float32
        return above_zero + (tokens - above_zero).exp()

    def weights(self, inputs: Inputs, allowed: Tensor | None) -> Tensor:
        products = self.features(inputs.query) @ self.features(inputs.key).transpose(-2, -1)
        if allowed is not None:
            products = products.masked_fill(~allowed, 0.0)
        total = products.sum(dim=-1, keepdim=True)
        return products / total.masked_fill(total == 0, 1.0)


@dataclass(frozen=True, eq=False)
class DeltaRule(Normalizer):
    """Fast weights written by the delta rule (Schlag et al., Linear Transformers Are Secretly Fast
    Weight Programmers, 2021): a memory S, from keys to values, corrected by each token.

        S_t = S_{t−1} + β_t (v_t − S_{t−1} k̂_t) k̂_tᵀ,   output_t = S_t q̂_t

    q̂ and k̂ are silu(q) and silu(k) at unit length, as in DeltaNet (Yang et al. 2024), which keeps
    the memory bounded for 0 ≤ β ≤ 1; Schlag et al. divide by the sum instead. A vector of zeros
    stays zero. A query sees the past only, so the mask must be `Causal`, alone or with `Padding`: a
    padded key writes nothing. As attention, the weights are

        W = tril(Q̂ K̂ᵀ) (I + diag(β) tril(K̂ K̂ᵀ, −1))⁻¹ diag(β)

    They may be negative and do not sum to 1.

    beta: for each key, the share of the old content that it replaces.
    """

    beta: Annotated[Tensor, "#batch #heads keys"]

    def check(self, inputs: Inputs) -> None:
        _check_plain(inputs, "the delta rule reads its memory by q̂")
        beta, (batch, num_heads) = self.beta, inputs.query.shape[:2]
        floating("beta", beta, inputs.query)
        fits = beta.ndim == 3 and beta.shape[0] in (1, batch) and beta.shape[1] in (1, num_heads)
        if not fits or beta.shape[2] != inputs.num_keys:
            raise ValueError(
                f"beta: expected [batch, heads, keys] = {[batch, num_heads, inputs.num_keys]}, "
                f"got {list(beta.shape)}"
            )
        masks = inputs.masks
        if not any(isinstance(mask, Causal) for mask in masks) or not all(
            isinstance(mask, Causal | Padding) for mask in masks
        ):
            raise ValueError(
                "mask: the delta rule is causal, expected Causal() or "
                "Causal() & Padding(lengths), "
                f"got {' & '.join(type(mask).__name__ for mask in masks) or None}"
            )
        if inputs.num_queries != inputs.num_keys:
            raise ValueError(
                "key: the delta rule has as many keys as queries, "
                f"got {inputs.num_keys} and {inputs.num_queries}"
            )

    @staticmethod
    def features(
        tokens: Annotated[Tensor, "batch heads tokens head_dim"],
    ) -> Annotated[Tensor, "batch heads tokens head_dim"]:
        """Return q̂ or k̂: silu of the tokens, at unit length."""
        active = F.silu(tokens)
        # vector_norm, because the gradient of 1 / √(sum of squares) is not finite for vectors
        # shorter than about 1e−13 in float32
        norm = torch.linalg.vector_norm(active, dim=-1, keepdim=True)
        return active / norm.masked_fill(norm == 0, torch.inf)

    def written(self, inputs: Inputs) -> Annotated[Tensor, "batch heads keys"]:
        """Return β, set to 0 for keys that are padding."""
        beta = self.beta.expand(*inputs.query.shape[:2], -1)
        is_real = inputs.real_keys()
        return beta if is_real is None else beta.masked_fill(~is_real[..., 0], 0.0)

    def weights(self, inputs: Inputs, allowed: Tensor | None) -> Tensor:
        query, key = self.features(inputs.query), self.features(inputs.key)
        beta = self.written(inputs)[..., None]
        written = beta * (key @ key.transpose(-2, -1)).tril(-1)
        reads = query @ key.transpose(-2, -1)
        if allowed is not None:
            reads = reads.masked_fill(~allowed, 0.0)
        # W (I + written) = reads, where I + written is unit lower triangular
        weights = torch.linalg.solve_triangular(
            written, reads, upper=False, left=False, unitriangular=True
        )
        return weights * beta.transpose(-2, -1)

    def select(self, heads: Tensor) -> DeltaRule:
        return self if self.beta.shape[1] == 1 else DeltaRule(self.beta[:, heads])


NORMALIZERS: dict[str, Normalizer] = {"softmax": Softmax(), "hard": Hard(), "linear": Linear()}


def as_normalizer(normalizer: str | Normalizer) -> Normalizer:
    """Return the normalizer of that name; raise ValueError for an unknown name."""
    if isinstance(normalizer, Normalizer):
        return normalizer
    if normalizer == "delta_rule":
        raise ValueError(
            "normalizer: 'delta_rule' has a tensor, give the object: "
            "normalizer=attnkit.DeltaRule(beta)"
        )
    if normalizer not in NORMALIZERS:
        raise ValueError(
            f"normalizer: expected one of {', '.join(NORMALIZERS)}, got {normalizer!r}"
        )
    return NORMALIZERS[normalizer]


class LearnedDeltaRule(nn.Module):
    """`DeltaRule` with β = sigmoid(W x + b) of each token x, one β for each head.

    Initially β is near ½, with W Xavier-uniform and b = 0.
    """

    def __init__(self, num_heads: int, key_dim: int) -> None:
        super().__init__()
        self.beta_proj = nn.Linear(key_dim, num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize W Xavier-uniform and b to 0."""
        nn.init.xavier_uniform_(self.beta_proj.weight)
        nn.init.zeros_(self.beta_proj.bias)

    def forward(self, tokens: Annotated[Tensor, "batch keys key_dim"]) -> DeltaRule:
        """Return the normalizer for the keys of `tokens`."""
        return DeltaRule(self.beta_proj(tokens).sigmoid().transpose(1, 2))


LEARNED_NORMALIZERS: dict[str, Callable[[int, int], nn.Module]] = {"delta_rule": LearnedDeltaRule}


def learned_normalizer(
    normalizer: str | Normalizer | nn.Module, num_heads: int, key_dim: int
) -> Normalizer | nn.Module:
    """Return what a block keeps for its argument `normalizer`: a module if there are parameters."""
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


def masked_scores(
    inputs: Inputs,
    allowed: Annotated[Tensor, "#batch #heads #queries #keys", bool] | None,
) -> Annotated[Tensor, "batch heads queries keys"]:
    """Return score(q_i, k_j) + bias_ij, −∞ where i may not look at j."""
    scores = inputs.score.scores(inputs.query, inputs.key)
    if inputs.bias is not None:
        scores = scores + inputs.bias
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def softmax(
    scores: Annotated[Tensor, "*rows keys"], sink: Annotated[Tensor, "heads"] | None = None
) -> Annotated[Tensor, "*rows keys"]:
    """Compute softmax over the last dimension; a row of −∞ only gives exactly 0, like its gradient.

    sink: one more score for each head, whose weight is left out; rows are [batch, heads, queries].
    """
    if scores.shape[-1] == 0:
        return scores
    if sink is not None:
        column = sink[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    scores, dead = revived(scores)
    return scores.softmax(dim=-1).masked_fill(dead, 0.0)


def revived(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores with 0 in rows of −∞ only, so that their gradients are finite, and which
    rows these are, [batch, heads, rows, 1]; the caller sets their output to 0."""
    dead = scores.detach().amax(dim=-1, keepdim=True) == -torch.inf
    if scores.is_cpu and has_values(scores.device) and not dead.any():  # never waits for a GPU
        return scores, dead
    return scores.masked_fill(dead, 0.0), dead


def _check_plain(inputs: Inputs, why: str) -> None:
    """Raise ValueError for a score or bias, which normalizers without scores cannot use."""
    score = inputs.score
    scale = score.scale if isinstance(score, ScaledDot) else 0.0
    if isinstance(scale, Tensor) or scale not in (None, 1.0) or score.softcap is not None:
        raise ValueError(f"score: {why}, expected 'scaled_dot' as it is, got {score!r}")
    if inputs.bias is not None:
        raise ValueError(f"bias: {why} and has no scores to add one to")


# Normalizers are pytrees, so that torch.export and torch.func accept them.
pytree.register_constant(Softmax)
pytree.register_constant(Hard)
pytree.register_constant(Linear)
pytree.register_dataclass(DeltaRule)
