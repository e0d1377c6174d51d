"""The n-grams of a caption, counted."""

from collections import Counter

from attnkit.metrics.captions import Tokens

__all__ = ["NGram", "check_n_gram", "count_ngrams"]

NGram = tuple[str, ...]


def count_ngrams(tokens: Tokens, n_gram: int) -> list[Counter[NGram]]:
    """How often each n-gram occurs: the counts of 1-grams, of 2-grams, …, of `n_gram`-grams."""
    return [
        Counter(zip(*(tokens[start:] for start in range(length)), strict=False))
        for length in range(1, n_gram + 1)
    ]


def check_n_gram(n_gram: int) -> None:
    if not isinstance(n_gram, int) or n_gram < 1:
        raise ValueError(f"n_gram: expected a positive integer, got {n_gram!r}")
