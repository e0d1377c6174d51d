"""The name that may have been meant, for error messages. Nothing of torch is imported."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: object, names: Iterable[str], *, cutoff: float = 0.55) -> str:
    """`; did you mean …?` with the most similar of some names, or nothing.

    Args:
        cutoff: how similar it has to be, from 0 to 1.
    """
    close = get_close_matches(str(name), list(names), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""
