"""Numbers as people read them: three significant digits, and the unit that fits."""

import math

_PREFIXES = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}


def three_digits(value: float, spread: float | None = None) -> str:
    """`0.557`, `12.3`, `1.23e-05`; with a spread, `0.557 ± 0.012`, as many places as the value."""
    if not math.isfinite(value):
        return str(value)
    exponent = _exponent(value)
    scale = 10.0**exponent if not -3 <= exponent < 5 else 1.0
    places = max(0, 2 - (exponent if scale == 1 else 0))
    texts = [f"{number / scale:.{places}f}" for number in (value, spread) if number is not None]
    text = " ± ".join(texts)
    if scale == 1:
        return text
    return f"{f'({text})' if spread is not None else text}e{exponent:+03d}"


def with_prefix(value: float) -> str:
    """`115 k`, `2.35 M`, `41.5 G`."""
    for scale, prefix in _PREFIXES.items():
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.3g} {prefix}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """`18.3 ms`, `4.18 s`, `12 min 05 s`, `3 h 20 min`."""
    if value < 0.9995:
        return f"{three_digits(1e3 * value)} ms"
    if value < 99.95:
        return f"{three_digits(value)} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _exponent(value: float) -> int:
    """Of the number with three digits: 0 of 9.99, 1 of 9.999."""
    return int(f"{abs(value):.2e}".partition("e")[2]) if value else 0
