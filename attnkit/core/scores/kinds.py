"""Scores: how well a query matches a key, and the dict from names to scores.

A score has a definition, `scores(query, key)`. Many also have a scaled dot product that equals the
score inside a softmax, `as_dot(query, key)`, which the fused kernels then compute. Parameters are
per query head and act on the query, so that key heads may be shared.
"""

from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attnkit.core.arguments import as_number, floating, positive
from attnkit.core.operators.cpu import has_tangent
from attnkit.core.operators.precision import wide

Owner = TypeVar("Owner", bound=Any)
Query = Annotated[Tensor, "batch heads queries head_dim"]
Key = Annotated[Tensor, "batch kv_heads keys head_dim"]
Scores = Annotated[Tensor, "batch heads queries keys"]

# Squared norms are divided by it, so that values up to 2²⁴ are within float16's range
NORM_UNIT = 256.0


@dataclass(frozen=True, eq=False)
class Score:
    """Base class of scores: a score says how well query i matches key j.

    Subclasses are frozen dataclasses; their tensors may require gradients. To write one of your
    own, define `uncapped`; the kernels `blockwise` and `reference` then compute it.

    softcap: None, or a bound: score ← softcap · tanh(score / softcap) (Gemma 2, 2024). Fused
    kernels do not compute it.
    """

    softcap: float | None = field(default=None, kw_only=True)
    by_head: ClassVar[tuple[str, int]] = "", 0
    """The name of the tensor that may differ between heads, and its number of dimensions if so."""

    def __post_init__(self) -> None:
        if self.softcap is not None:
            positive(softcap=as_number("softcap", self.softcap))

    def check(self, query: Query, key: Key) -> None:
        """Raise ValueError if query and key do not fit each other or the score's tensors."""
        if key.shape[3] != query.shape[3]:
            raise ValueError(f"key: expected query's head_dim {query.shape[3]}, got {key.shape[3]}")

    def scores(self, query: Query, key: Key) -> Scores:
        """Compute the scores of equally many query and key heads; a subclass may do it in another
        way than its definition, to hold no tensor that is larger than the scores."""
        return self.definition(query, key)

    def definition(self, query: Query, key: Key) -> Scores:
        """Compute the scores by their definition, against which every kernel is tested."""
        return self.cap(self.uncapped(query, key))

    def uncapped(self, query: Query, key: Key) -> Scores:
        """Compute the scores by their definition, without softcap."""
        raise NotImplementedError(f"{type(self).__name__} defines no uncapped()")

    def cap(self, scores: Scores) -> Scores:
        """Apply the softcap to the scores."""
        if self.softcap is None:
            return scores
        return self.softcap * (scores / self.softcap).tanh()

    def dot_dim(self, head_dim: int) -> int | None:
        """Return the head dimension of `as_dot`; None if the score is not a dot product."""
        return None

    def as_dot(
        self,
        query: Query,
        key: Key,
        is_real: Annotated[Tensor, "batch 1 keys 1", bool] | None = None,
    ) -> tuple[
        Annotated[Tensor, "batch heads queries dot_dim"],
        Annotated[Tensor, "batch kv_heads keys dot_dim"],
        float,
    ]:
        """Return query, key and scale whose scaled dot product is this score before its softcap.

        Without softcap, terms that depend on the query alone may be missing, since they cancel in a
        softmax. is_real: which keys are not padding, [batch, 1, keys, 1], for a score that computes
        with all keys of an item together; None: all.
        """
        raise NotImplementedError(f"{type(self).__name__} is not a dot product")

    def select(self, heads: Annotated[Tensor, "chosen_heads", int]) -> "Score":
        """Return the score of the given query heads only."""
        name, ndim = self.by_head
        tensor: Any = getattr(self, name, None)
        if not isinstance(tensor, Tensor) or tensor.ndim < ndim or len(tensor) == 1:
            return self
        chosen: dict[str, Any] = {name: tensor[heads]}
        return replace(self, **chosen)

    def to(self, *args: Any, **kwargs: Any) -> "Score":
        """Return the same score with its tensors moved as by `Tensor.to`."""
        return moved(self, *args, **kwargs)

    def __str__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True, eq=False)
class ScaledDot(Score):
    """score(q, k) = scale · q·k (Vaswani et al., Attention Is All You Need, 2017).

    scale: a finite number, or a tensor with one number for all heads or one for each, which may
        require a gradient; None: 1/√head_dim.
    """

    scale: float | Annotated[Tensor, "#heads"] | None = None
    by_head = "scale", 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.scale, int | float) and not -inf < self.scale < inf:
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

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        # the query is scaled, since it usually has fewer numbers than the scores
        query, key, factor = self.as_dot(query, key)
        if self.softcap is None:
            return (factor * query) @ key.transpose(-2, -1)
        return self.softcap * (factor / self.softcap * query @ key.transpose(-2, -1)).tanh()

    def dot_dim(self, head_dim: int) -> int:
        return head_dim

    def as_dot(
        self, query: Tensor, key: Tensor, is_real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, float]:
        if isinstance(self.scale, Tensor):
            query = (_high(query) * per_head(self.scale)).to(query.dtype)
        return query, key, self.factor(query.shape[3])

    def factor(self, head_dim: int) -> float:
        """Return the factor on q·k; 1 for a scale that is a tensor, which `as_dot` applies."""
        if isinstance(self.scale, Tensor):
            return 1.0
        if self.scale is not None:
            return float(self.scale)
        return float(head_dim**-0.5) if head_dim else 1.0


def Dot(*, softcap: float | None = None) -> ScaledDot:
    """Return the score q·k (Luong et al., Effective Approaches to Attention-based NMT, 2015)."""
    return ScaledDot(scale=1.0, softcap=softcap)


@dataclass(frozen=True, eq=False)
class General(Score):
    """score(q, k) = qᵀ W k, the general or bilinear score (Luong et al. 2015).

    weight: W, one matrix for all heads or one for each; query and key may differ in head_dim.
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


class _OfPositiveNumber(Score):
    """Base class of scores whose parameter, named by `by_head`, is a positive number, one for all
    heads or one for each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(**{self.by_head[0]: getattr(self, self.by_head[0])})

    def check(self, query: Tensor, key: Tensor) -> None:
        super().check(query, key)
        number = getattr(self, self.by_head[0])
        if not isinstance(number, int | float):
            check_fit(self.by_head[0], number, (query.shape[1],), query)


@dataclass(frozen=True, eq=False)
class Cosine(_OfPositiveNumber):
    """score(q, k) = cos(q, k) / temperature, as in Swin Transformer V2 (Liu et al. 2022), which
    learns the temperature, initially 0.1.

    A vector of zeros has cosine 0 with every vector, and gets no gradient.

    temperature: a positive number, one for all heads or one for each.
    """

    temperature: float | Annotated[Tensor, "*heads"] = 1.0
    by_head = "temperature", 1

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
class Gaussian(_OfPositiveNumber):
    """score(q, k) = −‖q − k‖² / (2 bandwidth²), with which softmax weights by a Gaussian kernel
    (Nadaraya 1964; Watson 1964).

    bandwidth: σ, a positive number, one for all heads or one for each.
    """

    bandwidth: float | Annotated[Tensor, "*heads"] = 1.0
    by_head = "bandwidth", 1

    def uncapped(self, query: Tensor, key: Tensor) -> Tensor:
        is_trained = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
        if is_trained or has_tangent((query, key)):
            # cdist has no forward-mode derivative, and before torch 2.12 no second derivative
            squares = (query[:, :, :, None] - key[:, :, None]).square().sum(dim=-1)
            return -0.5 * squares / per_head(self.bandwidth) ** 2
        # not by a matrix product, which loses all digits for points that are close and far from 0
        distance = torch.cdist(query, key, compute_mode="donot_use_mm_for_euclid_dist")
        return -0.5 * (distance / per_head(self.bandwidth)).square()

    def dot_dim(self, head_dim: int) -> int:
        return head_dim + 2

    def as_dot(
        self, query: Tensor, key: Tensor, is_real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, float]:
        """Return [q, 1, 1] and [k, high, low] with high + low = −‖k‖²/2, so that their product over
        σ² is the score. Points are shifted by the keys' mean and divided by the mean bandwidth.

        The shift changes no distance and keeps the norms small. The norm in two parts is as exact
        in half precision as the products are, and the division keeps it within float16's range. The
        mean is taken over keys that are not padding, since padding may lie far off. Keys that
        another mask hides do count, which can change the rounding and nothing else.
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
        # the norm is that of the rounded key, so that rounding amounts to moving the point
        key_points = ((points - centre) / unit).to(key.dtype)
        norm = -_high(key_points).square().sum(dim=-1, keepdim=True) / (2 * NORM_UNIT)
        high = norm.clamp(min=torch.finfo(key.dtype).min).to(key.dtype)
        low = (norm - high).detach().to(key.dtype)
        channel = (NORM_UNIT * factor).expand(*query.shape[:3], 1)
        query_parts = [(factor * query_points).to(query.dtype), channel, channel]
        key_parts = [key_points, high, low]
        if self.softcap is not None:  # tanh, unlike softmax, needs the term of the query alone
            query_norm = query_points.square().sum(dim=-1, keepdim=True) / -2
            query_parts.append((factor * query_norm).to(query.dtype))
            key_parts.append(torch.ones_like(high))
        return torch.cat(query_parts, dim=-1), torch.cat(key_parts, dim=-1), 1.0


SCORES: dict[str, Score] = {
    "scaled_dot": ScaledDot(),
    "dot": Dot(),
    "cosine": Cosine(),
    "gaussian": Gaussian(),
}
_WITH_TENSORS = {"general": "General(weight)", "additive": "Additive(vector)"}


def as_score(score: str | Score, scale: float | Annotated[Tensor, "#heads"] | None = None) -> Score:
    """Return the score of that name, with the caller's scale.

    Raises:
        ValueError: there is no score of that name, or it has no scale.
    """
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
    if not isinstance(scale, Tensor):
        scale = as_number("scale", scale)
    return replace(score, scale=scale)


def moved(owner: Owner, *args: Any, **kwargs: Any) -> Owner:
    """Return the dataclass with its tensors moved as by `Tensor.to`."""
    changed: dict[str, Any] = {}
    for own in fields(owner):
        value = getattr(owner, own.name)
        if isinstance(value, Tensor) and (copy := value.to(*args, **kwargs)) is not value:
            changed[own.name] = copy
    return replace(owner, **changed) if changed else owner


def per_head(parameter: float | Tensor) -> float | Tensor:
    """Return the parameter, broadcastable to [batch, heads, queries, ...]."""
    if isinstance(parameter, Tensor) and parameter.ndim == 1:
        return parameter[:, None, None]
    return parameter


def check_fit(name: str, tensor: object, shape: tuple[int, ...], query: Tensor) -> None:
    """Raise ValueError unless the tensor has this shape, with or without the heads in front."""
    floating(name, tensor, query)
    assert isinstance(tensor, Tensor)
    if tuple(tensor.shape) not in (shape, shape[1:]):
        raise ValueError(
            f"{name}: expected the shape {list(shape[1:])} or, with heads, {list(shape)}, "
            f"got {list(tensor.shape)}"
        )


def _high(tensor: Tensor) -> Tensor:
    return tensor.to(wide(tensor.dtype))


def _unit(vectors: Tensor) -> Tensor:
    squares = vectors.square().sum(dim=-1, keepdim=True)
    is_zero = squares == 0
    # zeros are replaced by 1 before the root, so that its gradient is finite, and then masked
    return vectors * squares.masked_fill(is_zero, 1.0).rsqrt().masked_fill(is_zero, 0.0)


# Scores are pytrees, so that torch.export and torch.func accept them.
for _score in (ScaledDot, General, Cosine, Gaussian):
    pytree.register_dataclass(_score)
