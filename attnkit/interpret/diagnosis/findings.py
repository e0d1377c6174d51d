"""What the numbers of a diagnosis say, in sentences with fixed words."""

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]

STATIC = 0.999
EVEN = 0.99
SINK = 0.5
ALIKE_BITS = 0.01


def findings_of(
    rows: list[Row], accuracy: float | None = None, uniform_accuracy: float | None = None
) -> list[str]:
    """A sentence for each thing that stands out; one that says so where nothing does."""
    found = [
        _heads(
            rows, "static", lambda value: value >= STATIC,
            f"rank the keys alike for every query (static score ≥ {STATIC}), so that they cannot "
            "depend on the query",
        ),
        _heads(
            rows, "entropy", lambda value: value >= EVEN,
            f"spread evenly over what they see (normalised entropy ≥ {EVEN})",
        ),
        _heads(
            rows, "sink", lambda value: value >= SINK,
            f"give {SINK:.0%} or more of their attention to one key",
        ),
        _heads(
            rows, "divergence", lambda value: value <= ALIKE_BITS,
            f"look where the other heads of their layer do (divergence ≤ {ALIKE_BITS} bits)",
        ),
        _heads(rows, "padding", lambda value: value > 0, "look at padding, which must be 0"),
    ]  # fmt: skip
    found += [_high_norms(rows), _against_uniform(rows)]
    if accuracy is not None and uniform_accuracy is not None:
        found.append(
            f"accuracy: {accuracy:.4f} with attention, {uniform_accuracy:.4f} with 1/degree in its "
            f"place; attention is worth {accuracy - uniform_accuracy:+.4f}."
        )
    return [sentence for sentence in found if sentence] or [
        "nothing stands out: no head is static, even, a sink, like the others or on padding, and "
        "no token's norm is high."
    ]


def _heads(rows: list[Row], name: str, is_found: Callable[[float], bool], words: str) -> str:
    measured = [row for row in rows if row[name] is not None]
    chosen = [row for row in measured if is_found(row[name])]
    if not chosen:
        return ""
    places = [f"{row['layer'] or '(itself)'} head {row['head']}" for row in chosen[:3]]
    more = f" and {len(chosen) - 3} more" if len(chosen) > 3 else ""
    low, high = (choose(row[name] for row in chosen) for choose in (min, max))
    between = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    return (
        f"{name}: {len(chosen)} of {len(measured)} heads {words}: {', '.join(places)}{more}; "
        f"{between}."
    )


def _high_norms(rows: list[Row]) -> str:
    shares = {row["layer"]: row["high_norm"] for row in rows if row["high_norm"]}
    if not shares:
        return ""
    layer = max(shares, key=lambda name: shares[name])
    return (
        f"high_norm: tokens with a norm over 4 times the median behind {len(shares)} layers, at "
        f"most {shares[layer]:.2%} of them, behind {layer or '(itself)'}; registers and gates are "
        "what is known to help."
    )


def _against_uniform(rows: list[Row]) -> str:
    measured = [row for row in rows if row["uniform"] is not None]
    if not measured:
        return ""
    mean = sum(row["uniform"] for row in measured) / len(measured)
    most = max(measured, key=lambda row: row["uniform"])
    return (
        f"uniform: heads move {mean:.1%} of the attention away from 1/degree in the mean, "
        f"{most['layer'] or '(itself)'} head {most['head']} the most, {most['uniform']:.1%}."
    )
