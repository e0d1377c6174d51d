"""Scores: how well a query matches a key, and the one dict from names to them.

A score knows its definition, `scores(query, key)`, and, if there is one, the scaled dot product
that equals it inside a softmax, `as_dot(query, key)`, which the fused kernels then compute.
Parameters are per query head and act on the query, so that key heads may be shared.
"""

from dataclasses import dataclass, replace
from math import isfinite
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attnkit.core.arguments import positive
from attnkit.core.operators.derivatives import has_tangent
from attnkit.core.precision import wide
from attnkit.core.scores.additive_operator import additive_definition, additive_scores
from attnkit.core.scores.base import Score, check_fit, check_number, per_head


@dataclass(frozen=True, eq=False)
class ScaledDot(Score):
    """score(q, k) = scale · q·k (Vaswani et al., Attention Is All You Need, 2017).

    scale: a finite number, one or one for each head, which may require a gradient; None is
        1/√head_dim.
    """

    scale: float | Annotated[Tensor, "#heads"] | None = None
    by_head = "scale", 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.scale, int | float) and not isfinite(self.scale):
            raise ValueError(f"scale: expected a finite number, got {self.scale}")

    def check(self, query: Tensor, key: Tensor) -> None:
        super().check(query, key)
        if isinstance(self.scale, Tensor) and self.scale.shape not in ((), (1,), query.shape[1:2]):
            raise ValueError(
                f"scale: expected a number or a tensor [], [1] or [{query.shape[1]} heads], "
                f"got {list(self.scale.shape)}"
            )

    def uncapped(self, query: Tensor, key: Tensor) -> Tensor:
        query, key, factor = self.as_dot(query, key)
        return factor * (query @ key.transpose(-2, -1))

    def dot_dim(self, head_dim: int) -> int:
        return head_dim

    def as_dot(
        self, query: Tensor, key: Tensor, is_real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, float]:
        if isinstance(self.scale, Tensor):
            query = (_high(query) * per_head(self.scale)).to(query.dtype)
        return query, key, self.factor(query.shape[3])

    def factor(self, head_dim: int) -> float:
        """The factor on q·k, beside that of a tensor, which the query has from `as_dot`."""
        if isinstance(self.scale, Tensor):
            return 1.0
        if self.scale is not None:
            return float(self.scale)
        return float(head_dim**-0.5) if head_dim else 1.0


def Dot(*, softcap: float | None = None) -> ScaledDot:
    """score(q, k) = q·k (Luong et al., Effective Approaches to Attention-based NMT, 2015)."""
    return ScaledDot(scale=1.0, softcap=softcap)


@dataclass(frozen=True, eq=False)
class General(Score):
    """score(q, k) = qᵀ W k, the general or bilinear score (Luong et al. 2015).

    weight: W, one or one for each head; query and key may differ in head_dim.
    """

    weight: Annotated[Tensor, "*heads head_dim key_head_dim"]
    by_head = "weight", 3

    def check(self, query: Tensor, key: Tensor) -> None:
        check_fit("weight", self.weight, (query.shape[1], query.shape[3], key.shape[3]), query)

    def uncapped(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ self.weight @ key.transpose(-2, -1)

    def dot_dim(self, head_dim: int) -> int:
        return self.weight.shape[-1]

    def as_dot(
        self, query: Tensor, key: Tensor, is_real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, float]:
        return query @ self.weight.to(query.dtype), key, 1.0


@dataclass(frozen=True, eq=False)
class Cosine(Score):
    """score(q, k) = cos(q, k) / temperature; Swin Transformer V2 (Liu et al. 2022) learns the
    temperature, and begins with 0.1.

    A vector of zeros has cosine 0 with every vector, and gets no gradient.

    temperature: a positive number, one or one for each head.
    """

    temperature: float | Annotated[Tensor, "*heads"] = 1.0
    by_head = "temperature", 1

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(temperature=self.temperature)

    def check(self, query: Tensor, key: Tensor) -> None:
        super().check(query, key)
        check_number("temperature", self.temperature, query)

    def uncapped(self, query: Tensor, key: Tensor) -> Tensor:
        return (_unit(query) @ _unit(key).transpose(-2, -1)) / per_head(self.temperature)

    def dot_dim(self, head_dim: int) -> int:
        return head_dim

    def as_dot(
        self, query: Tensor, key: Tensor, is_real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, float]:
        unit_query, unit_key = _unit(_high(query)), _unit(_high(key)).to(key.dtype)
        if not isinstance(self.temperature, Tensor):
            return unit_query.to(query.dtype), unit_key, 1 / self.temperature
        return (unit_query / per_head(self.temperature)).to(query.dtype), unit_key, 1.0


@dataclass(frozen=True, eq=False)
class Gaussian(Score):
    """score(q, k) = −‖q − k‖² / (2 bandwidth²): softmax then weights by a Gaussian kernel
    (Nadaraya 1964; Watson 1964).

    bandwidth: σ, a positive number, one or one for each head.
    """

    bandwidth: float | Annotated[Tensor, "*heads"] = 1.0
    by_head = "bandwidth", 1

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(bandwidth=self.bandwidth)

    def check(self, query: Tensor, key: Tensor) -> None:
        super().check(query, key)
        check_number("bandwidth", self.bandwidth, query)

    def uncapped(self, query: Tensor, key: Tensor) -> Tensor:
        is_trained = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
        if is_trained or has_tangent((query, key)):
            # cdist has no derivative in forward mode, and before torch 2.12 no second one
            squares = (query[:, :, :, None] - key[:, :, None]).square().sum(dim=-1)
            return -0.5 * squares / per_head(self.bandwidth) ** 2
        # not by a matrix product: that would cancel where points are close and far from 0
        distance = torch.cdist(query, key, compute_mode="donot_use_mm_for_euclid_dist")
        return -0.5 * (distance / per_head(self.bandwidth)).square()

    def dot_dim(self, head_dim: int) -> int:
        return head_dim + 2

    def as_dot(
        self, query: Tensor, key: Tensor, is_real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, float]:
        """[q, 1, 1] · [k, high, low] / σ² with high + low = −‖k‖²/2, of points moved so that the
        keys' mean is 0 and measured in a common unit, the mean bandwidth.

        Moving them changes no distance and keeps the norms small; the norm in two parts is as
        exact in half precision as the products are; the unit keeps it within float16's range. The
        mean is that of the keys that are not padding, which may lie far off; keys that another mask
        hides count, and so can change the rounding, nothing else.
        """
        points = _high(key)
        if is_real is None:
            centre = points.detach().mean(dim=2, keepdim=True)
        else:
            points = points.masked_fill(~is_real, 0.0)
            count = is_real.sum(dim=2, keepdim=True).clamp(min=1)
            centre = points.detach().sum(dim=2, keepdim=True) / count
        unit: float | Tensor = self.bandwidth
        factor = query.new_ones(())
        if isinstance(self.bandwidth, Tensor):
            unit = _high(self.bandwidth.detach()).mean()
            factor = (unit / per_head(self.bandwidth)).square().to(query.dtype)
        centre_of_query = centre.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        query_points = (_high(query) - centre_of_query) / unit
        # the norm is that of the rounded key: so rounding moves a point and does nothing else
        key_points = ((points - centre) / unit).to(key.dtype)
        norm = -_high(key_points).square().sum(dim=-1, keepdim=True) / (2 * NORM_UNIT)
        high = norm.clamp(min=torch.finfo(key.dtype).min).to(key.dtype)
        low = (norm - high).detach().to(key.dtype)
        channel = (NORM_UNIT * factor).expand(*query.shape[:3], 1)
        query_parts = [(factor * query_points).to(query.dtype), channel, channel]
        key_parts = [key_points, high, low]
        if self.softcap is not None:  # which sees what softmax does not
            query_norm = query_points.square().sum(dim=-1, keepdim=True) / -2
            query_parts.append((factor * query_norm).to(query.dtype))
            key_parts.append(torch.ones_like(high))
        return torch.cat(query_parts, dim=-1), torch.cat(key_parts, dim=-1), 1.0


@dataclass(frozen=True, eq=False)
class Additive(Score):
    """score(q, k) = vᵀ activation(q + k).

    With tanh it is Bahdanau's score, vᵀ tanh(W_q x + W_k y) (Bahdanau et al., Neural Machine
    Translation by Jointly Learning to Align and Translate, 2015), with LeakyReLU that of GATv2
    (Brody et al. 2022). The projections W_q and W_k are those of the block that gives the queries
    and keys.

    vector: v, one or one for each head.
    activation: "tanh" or "leaky_relu".
    negative_slope: of "leaky_relu" alone, not negative; None: 0.2.
    """

    vector: Annotated[Tensor, "*heads head_dim"]
    by_head = "vector", 2
    activation: Literal["tanh", "leaky_relu"] = "tanh"
    negative_slope: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation not in ("tanh", "leaky_relu"):
            raise ValueError(
                f"activation: expected 'tanh' or 'leaky_relu', got {self.activation!r}"
            )
        if self.activation == "leaky_relu" and self.negative_slope is None:
            object.__setattr__(self, "negative_slope", 0.2)
        if self.negative_slope is None:
            return
        if self.activation == "tanh":
            raise ValueError(
                f"negative_slope: only the activation 'leaky_relu' has one, "
                f"got {self.negative_slope} with 'tanh'"
            )
        if not 0 <= self.negative_slope < float("inf"):
            raise ValueError(f"negative_slope: expected at least 0, got {self.negative_slope}")

    def check(self, query: Tensor, key: Tensor) -> None:
        super().check(query, key)
        check_fit("vector", self.vector, (query.shape[1], query.shape[3]), query)

    def uncapped(self, query: Tensor, key: Tensor) -> Tensor:
        return additive_definition(query, key, self.vector, self.negative_slope)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        # an exported program does not know our operator, which has no rules for torch.func and for
        # forward mode either
        if (
            torch.compiler.is_exporting()
            or torch._C._are_functorch_transforms_active()
            or has_tangent((query, key, self.vector))
        ):
            return self.definition(query, key)
        vector = self.vector.expand(*query.shape[:2], -1)
        scores = additive_scores(
            query.flatten(0, 1), key.flatten(0, 1), vector.flatten(0, 1), self.negative_slope
        )
        return self.cap(scores.unflatten(0, query.shape[:2]))


SCORES: dict[str, Score] = {
    "scaled_dot": ScaledDot(),
    "dot": Dot(),
    "cosine": Cosine(),
    "gaussian": Gaussian(),
}
_WITH_TENSORS = {"general": "General(weight)", "additive": "Additive(vector)"}


def as_score(score: str | Score, scale: float | Annotated[Tensor, "#heads"] | None = None) -> Score:
    """The score of that name, with the caller's scale; ValueError lists the names there are."""
    if not isinstance(score, Score):
        if score in _WITH_TENSORS:
            raise ValueError(
                f"score: {score!r} has a tensor, give the object: "
                f"score=attnkit.{_WITH_TENSORS[score]}"
            )
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
    return replace(score, scale=scale if isinstance(scale, Tensor) else float(scale))


# Norms are divided by it, so that those up to 2²⁴ are within float16's range
NORM_UNIT = 256.0


def _high(tensor: Tensor) -> Tensor:
    return tensor.to(wide(tensor.dtype))


def _unit(vectors: Tensor) -> Tensor:
    squares = vectors.square().sum(dim=-1, keepdim=True)
    is_zero = squares == 0
    # the root of 1, not of 0: its gradient is finite, and then masked
    return vectors * squares.masked_fill(is_zero, 1.0).rsqrt().masked_fill(is_zero, 0.0)


# As pytrees, scores pass through torch.export and torch.func.
for _score in (ScaledDot, General, Cosine, Gaussian, Additive):
    pytree.register_dataclass(_score)
