"""Counts of the n-grams of a caption."""

from collections import Counter
from itertools import chain

from attnkit.metrics.captions import Tokens

NGram = tuple[str, ...]


def count_ngrams(tokens: Tokens, n_gram: int) -> Counter[NGram]:
    """Count each n-gram of 1 to `n_gram` tokens."""
    shifted = [tokens[start:] for start in range(n_gram)]
    return Counter(
        chain.from_iterable(zip(*shifted[:n], strict=False) for n in range(1, n_gram + 1))
    )


def check_n_gram(n_gram: int) -> None:
    if not isinstance(n_gram, int) or n_gram < 1:
        raise ValueError(f"n_gram: expected a positive integer, got {n_gram!r}")
