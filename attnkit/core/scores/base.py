"""What a score is, and the checks of its parameters."""

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, TypeVar

from torch import Tensor

from attnkit.core.arguments import floating, positive

Owner = TypeVar("Owner", bound=Any)
Query = Annotated[Tensor, "batch heads queries head_dim"]
Key = Annotated[Tensor, "batch kv_heads keys head_dim"]
Scores = Annotated[Tensor, "batch heads queries keys"]


@dataclass(frozen=True, eq=False)
class Score:
    """How well query i matches key j.

    Subclasses are frozen dataclasses; their tensors may require gradients. To write one of your
    own, define `uncapped`; the kernels `blockwise` and `reference` serve it.

    softcap: None, or a bound: score ← softcap · tanh(score / softcap) (Gemma 2, 2024). Fused
    kernels do not compute it.
    """

    softcap: float | None = field(default=None, kw_only=True)
    by_head: ClassVar[tuple[str, int]] = "", 0
    """The tensor that may be one for each head, and how many dimensions it then has."""

    def __post_init__(self) -> None:
        positive(softcap=self.softcap)

    def check(self, query: Query, key: Key) -> None:
        """ValueError where query and key do not fit each other or the score's tensors."""
        if key.shape[3] != query.shape[3]:
            raise ValueError(f"key: expected query's head_dim {query.shape[3]}, got {key.shape[3]}")

    def scores(self, query: Query, key: Key) -> Scores:
        """The scores of as many query as key heads; of larger tensors than they are none is held,
        if need be by other means than the definition's."""
        return self.definition(query, key)

    def definition(self, query: Query, key: Key) -> Scores:
        """What every kernel is held against."""
        return self.cap(self.uncapped(query, key))

    def uncapped(self, query: Query, key: Key) -> Scores:
        """The definition without softcap."""
        raise NotImplementedError(f"{type(self).__name__} defines no uncapped()")

    def cap(self, scores: Scores) -> Scores:
        """The scores within ±softcap."""
        if self.softcap is None:
            return scores
        return self.softcap * (scores / self.softcap).tanh()

    def dot_dim(self, head_dim: int) -> int | None:
        """The head dimension of `as_dot`; None if the score is not a dot product."""
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
        """Query, key and scale whose scaled dot product is this score before its softcap.

        Without softcap it may lack what depends on the query alone, which softmax does not see.
        is_real: which keys are not padding, [batch, 1, keys, 1], for a score that computes with all
        keys of an item together; None: all.
        """
        raise NotImplementedError(f"{type(self).__name__} is not a dot product")

    def select(self, heads: Annotated[Tensor, "chosen_heads", int]) -> "Score":
        """The score of some query heads only."""
        name, ndim = self.by_head
        tensor: Any = getattr(self, name, None)
        if not isinstance(tensor, Tensor) or tensor.ndim < ndim or len(tensor) == 1:
            return self
        chosen: dict[str, Any] = {name: tensor[heads]}
        return replace(self, **chosen)

    def to(self, *args: Any, **kwargs: Any) -> "Score":
        """The same score with its tensors moved as by `Tensor.to`."""
        return moved(self, *args, **kwargs)

    def __str__(self) -> str:
        return type(self).__name__


def moved(owner: Owner, *args: Any, **kwargs: Any) -> Owner:
    """A dataclass with its tensors moved as by `Tensor.to`."""
    changed: dict[str, Any] = {}
    for own in fields(owner):
        value = getattr(owner, own.name)
        if isinstance(value, Tensor) and (copy := value.to(*args, **kwargs)) is not value:
            changed[own.name] = copy
    return replace(owner, **changed) if changed else owner


def per_head(parameter: float | Tensor) -> float | Tensor:
    """The parameter, broadcastable to [batch, heads, queries, ...]."""
    if isinstance(parameter, Tensor) and parameter.ndim == 1:
        return parameter[:, None, None]
    return parameter


def check_number(name: str, value: object, query: Tensor) -> None:
    if not isinstance(value, int | float):
        check_fit(name, value, (query.shape[1],), query)


def check_fit(name: str, tensor: object, shape: tuple[int, ...], query: Tensor) -> None:
    """The tensor has this shape, or lacks its first dimension, that of the heads."""
    floating(name, tensor, query)
    assert isinstance(tensor, Tensor)
    if tuple(tensor.shape) not in (shape, shape[1:]):
        raise ValueError(
            f"{name}: expected the shape {list(shape[1:])} or, with heads, {list(shape)}, "
            f"got {list(tensor.shape)}"
        )
