"""Suggestions of a similar name for error messages. This module imports no torch."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: object, names: Iterable[str], *, cutoff: float = 0.55) -> str:
    """Return `; did you mean …?` with the most similar of the names, or "".

    Args:
        cutoff: the least similarity, from 0 to 1.
    """
    close = get_close_matches(str(name), list(names), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""
