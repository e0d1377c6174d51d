"""A cache of the keys and values of past tokens, for decoding one step at a time."""

from typing import Annotated

import torch
from torch import Tensor


class KeyValueCache:
    """A cache of the keys and values [batch, kv_heads, tokens, head_dim] of the tokens so far.

    Memory for `max_tokens` is allocated once. Each step appends its tokens and reads all of them,
    so that decoding n tokens computes n rows of attention, not 1 + … + n.
    `MultiHeadAttention.new_cache` makes one of the right sizes.

    Writing is in place, which autograd cannot follow: decode under `torch.no_grad()`.

    Args:
        batch, num_heads, max_tokens: sizes; `num_heads` is the number of key/value heads.
        head_dim: channels of a key.
        value_dim: channels of a value; None: `head_dim`.
    """

    def __init__(
        self,
        batch: int,
        num_heads: int,
        max_tokens: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        self._key = torch.empty(batch, num_heads, max_tokens, head_dim, dtype=dtype, device=device)
        self._value = torch.empty(
            batch, num_heads, max_tokens, value_dim, dtype=dtype, device=device
        )
        self.num_tokens = 0

    @classmethod
    def of(
        cls,
        key: Annotated[Tensor, "batch kv_heads tokens head_dim"],
        value: Annotated[Tensor, "batch kv_heads tokens value_dim"],
    ) -> "KeyValueCache":
        """Make a full cache: a memory, such as an encoder's output, that every step reads."""
        cache = cls.__new__(cls)
        cache._key, cache._value, cache.num_tokens = key, value, key.shape[2]
        return cache

    @property
    def key(self) -> Annotated[Tensor, "batch kv_heads tokens head_dim"]:
        """The keys so far."""
        return self._key[:, :, : self.num_tokens]

    @property
    def value(self) -> Annotated[Tensor, "batch kv_heads tokens value_dim"]:
        """The values so far."""
        return self._value[:, :, : self.num_tokens]

    @property
    def max_tokens(self) -> int:
        """The number of tokens that there is memory for."""
        return self._key.shape[2]

    def append(
        self,
        key: Annotated[Tensor, "batch kv_heads tokens head_dim"],
        value: Annotated[Tensor, "batch kv_heads tokens value_dim"],
    ) -> None:
        """Append the tokens of a step.

        Raises:
            ValueError: a shape or dtype does not fit, the cache is full, or a tensor requires a
                gradient.
        """
        self.write(key, value)
        self.num_tokens += key.shape[2]

    def write(
        self,
        key: Annotated[Tensor, "batch kv_heads _ head_dim"],
        value: Annotated[Tensor, "batch kv_heads _ value_dim"],
    ) -> tuple[
        Annotated[Tensor, "batch kv_heads tokens head_dim"],
        Annotated[Tensor, "batch kv_heads tokens value_dim"],
    ]:
        """Write the tokens of a step as `append` does, without counting them: the caller increases
        `num_tokens` once it has computed, so that a call that raises leaves the cache unchanged.

        Returns:
            The keys and the values of all tokens, including the new ones.
        """
        num_new = key.shape[2]
        if self.num_tokens + num_new > self.max_tokens:
            raise ValueError(
                f"cache: has room for {self.max_tokens} tokens, "
                f"got {num_new} after {self.num_tokens}"
            )
        for name, kept, new in (("key", self._key, key), ("value", self._value, value)):
            if new.requires_grad:
                raise ValueError(
                    f"cache: the {name} requires a gradient, which writing in place would lose; "
                    "decode under torch.no_grad()"
                )
            expected = (kept.shape[0], kept.shape[1], num_new, kept.shape[3])
            if tuple(new.shape) != expected or new.dtype != kept.dtype:
                raise ValueError(
                    f"cache: expected a {name} {list(expected)} of {kept.dtype}, "
                    f"got {list(new.shape)} of {new.dtype}"
                )
            kept[:, :, self.num_tokens : self.num_tokens + num_new] = new
        num_tokens = self.num_tokens + num_new
        return self._key[:, :, :num_tokens], self._value[:, :, :num_tokens]

    def select(self, items: Annotated[Tensor, "items", int]) -> "KeyValueCache":
        """Return the cache of the given batch items, in their order and with repeats, as beam
        search needs it to continue hypotheses."""
        chosen = KeyValueCache.of(self._key[items], self._value[items])
        chosen.num_tokens = self.num_tokens
        return chosen

    def __repr__(self) -> str:
        return (
            f"KeyValueCache({self.num_tokens} of {self.max_tokens} tokens, "
            f"batch {self._key.shape[0]}, {self._key.shape[1]} heads × {self._key.shape[3]})"
        )
