"""Keys of images: content has the same one under any name, in any folder and any process."""

from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import Tensor


def keys_of(contents: Iterable[bytes]) -> Tensor:
    """int64 [contents], the same for equal ones.

    Of 64 bits: among a million different contents two share theirs with a probability of 3e-8.
    """
    digests = [blake2b(content, digest_size=8).digest() for content in contents]
    return torch.tensor([int.from_bytes(d, "little", signed=True) for d in digests]).long()


def first_of_equal(keys: Tensor) -> list[int]:
    """Of each content the number of the first with the same key."""
    firsts: dict[int, int] = {}
    return [firsts.setdefault(key, number) for number, key in enumerate(keys.tolist())]
