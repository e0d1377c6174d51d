"""The result of `attnkit.diagnose_attention`: a table of measures and its findings."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from attnkit.interpret.text_table import text_table

Row = dict[str, Any]

MEASURES = (
    "entropy", "sink", "prefix", "padding", "distance", "divergence", "static", "uniform",
    "high_norm",
)  # fmt: skip
MOST_ROWS = 48  # a longer table is printed with one row for each layer
SINK = 0.5  # a finding reports a key that takes at least this share of a head's attention


class _Sign(NamedTuple):
    """A finding about a column: the condition on a head's number, and the words that report it."""

    column: str
    is_met: Callable[[float], bool]
    words: str


SIGNS = (
    _Sign("padding", lambda value: value > 0, "look at padding, which must be 0"),
    _Sign(
        "static",
        lambda value: value >= 0.999,
        "rank the keys alike for every query (static score ≥ 0.999), so that they cannot depend on "
        "the query",
    ),
    _Sign(
        "entropy",
        lambda value: value >= 0.99,
        "spread evenly over what they see (normalised entropy ≥ 0.99), as a mean would",
    ),
    _Sign(
        "sink",
        lambda value: value >= SINK,
        f"give {SINK:.0%} or more of their attention to one key; gates and registers are what is "
        "known to help",
    ),
)
"""Possible findings, in the order in which a user should act on them."""


@dataclass(eq=False, repr=False)
class Diagnosis:
    """Measures of each attention head of a model; `print` shows a table and the findings.

    rows: a dictionary for each head of each call: `layer`, `call` (how often the layer ran before),
        `edge_type` (for heterogeneous graphs, else None), `head`, and the following numbers, which
        are None if they have no meaning or could not be measured:

        entropy: mean over rows of −Σ w ln w / ln(number of visible keys): 1 even, 0 one key.
        sink: largest share of all attention that a single key takes.
        prefix: share of attention on class and register tokens.
        padding: share of attention on padding; must be 0.
        distance: mean distance from patch to patch, in patches.
        divergence: mean Jensen–Shannon divergence from the other heads, in bits: 0 equal heads,
            1 disjoint heads.
        static: mean Kendall τ between two queries' rankings of the keys that both see: 1 if all
            queries rank alike.
        uniform: for graphs, mean total variation distance from 1/degree, 0 to 1.
        high_norm: share of tokens after the layer's block with a norm over 4 × their median.

        For graphs there also is `entropy_by_degree`: the entropy of nodes with 2, 3–4, 5–8, …
        edges.
    findings: what stands out, at most five sentences.
    notes: what was drawn or assumed, in sentences.
    accuracy, uniform_accuracy: accuracy of a graph model with labels, with its attention and with
        1/degree in its place.
    """

    rows: list[Row]
    findings: list[str]
    notes: list[str] = field(default_factory=list)
    accuracy: float | None = None
    uniform_accuracy: float | None = None

    def __repr__(self) -> str:
        rows, heading, below = self.rows, "head", [""]
        if len(rows) > MOST_ROWS:
            rows, heading = _layer_means(rows), "heads"
            below = ["means over the heads of a layer; `rows` has every head", ""]
        shown = [name for name in MEASURES if any(row[name] is not None for row in rows)]
        table = [["layer", heading, *shown]]
        for row in rows:
            numbers = ("–" if row[name] is None else f"{row[name]:.3f}" for name in shown)
            table.append([_place(row), str(row["head"]), *numbers])
        return "\n".join([text_table(table), *below, *self.findings, *self.notes])


def findings_of(
    rows: list[Row], accuracy: float | None = None, uniform_accuracy: float | None = None
) -> list[str]:
    """Return at most five sentences on what stands out, or one that says that nothing does."""
    found = []
    if accuracy is not None and uniform_accuracy is not None:
        found.append(
            f"accuracy: {accuracy:.4f} with attention, {uniform_accuracy:.4f} with 1/degree in its "
            f"place; attention is worth {accuracy - uniform_accuracy:+.4f}."
        )
    for column, is_met, words in SIGNS:
        measured = [row for row in rows if row[column] is not None]
        chosen = [row for row in measured if is_met(row[column])]
        if chosen:
            places = ", ".join(f"{_place(row)} head {row['head']}" for row in chosen[:3])
            more = f" and {len(chosen) - 3} more" if len(chosen) > 3 else ""
            low, high = (f"{least(row[column] for row in chosen):.4g}" for least in (min, max))
            found.append(
                f"{column}: {len(chosen)} of {len(measured)} heads {words}: {places}{more}; "
                + (f"{low}." if low == high else f"{low} to {high}.")
            )
    return found or ["nothing stands out: no head is on padding, static, even or a sink."]


def _layer_means(rows: list[Row]) -> list[Row]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["layer"], row["call"], row["edge_type"]), []).append(row)
    means = []
    for heads in groups.values():
        mean: Row = {"head": len(heads)}
        for name in MEASURES:
            known = [row[name] for row in heads if row[name] is not None]
            mean[name] = sum(known) / len(known) if known else None
        means.append(heads[0] | mean)
    return means


def _place(row: Row) -> str:
    words = [row["layer"] or "(itself)"]
    words += [f"call {row['call']}"] if row["call"] else []
    words += [" ".join(row["edge_type"])] if row["edge_type"] else []
    return ", ".join(words)
