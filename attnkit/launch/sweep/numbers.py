"""The figures and values of trials, as people read them."""

import math
from collections.abc import Iterable, Mapping

from attnkit.lightning.telling.numbers import seconds, three_digits, with_prefix

_COUNTS = ("parameters", "multiply_adds")
_PLAIN = 6  # characters that nobody has to shorten
_MOST_DIGITS = 17  # of a float


def figure(results: Mapping[str, float], name: str) -> str:
    """A figure of results.json, with its standard deviation where there is one over seeds."""
    if name not in results:
        return ""
    value = results[name]
    if name in _COUNTS:
        return with_prefix(value)
    if name.endswith("seconds"):
        return seconds(value)
    spread = results.get(f"{name}_std")
    if results.get("num_seeds", 1) == 1 or spread is None:
        return three_digits(value)
    return three_digits(value, spread)


def shortened(texts: Iterable[str]) -> dict[str, str]:
    """Each of the values of a key as it is shown: long decimal numbers with three significant
    digits, with more where two values would be one; all else as it is."""
    texts = list(dict.fromkeys(texts))
    shown: dict[str, str] = {}
    for digits in range(3, _MOST_DIGITS):
        shown = {text: _rounded(text, digits) for text in texts}
        if len(set(shown.values())) == len(texts):
            return shown
    return {text: text for text in texts}


def _rounded(text: str, digits: int) -> str:
    try:
        value = float(text)
    except ValueError:
        return text
    whole = text.lstrip("+-").isdigit()
    if whole or len(text) <= _PLAIN or not math.isfinite(value):
        return text
    return f"{value:.{digits}g}"
