"""What `attnkit.diagnose_attention` returns."""

from dataclasses import dataclass, field
from typing import Any

MEASURES = (
    "entropy", "sink", "prefix", "padding", "distance", "divergence", "static", "uniform",
    "high_norm",
)  # fmt: skip
MOST_ROWS = 48  # of the printed table, which else has one row for each layer


@dataclass(eq=False, repr=False)
class Diagnosis:
    """What each head of each layer does; `print` shows a table and the findings.

    rows: a dictionary for each call, head by head: `layer`, `call` (0, or the times the layer ran
        before), `edge_type` (of heterogeneous graphs, else None), `head`, and a number for each of
        the following, or None where it has no meaning or could not be measured:

        entropy: mean of −Σ w ln w over ln of the keys that a row may see: 1 even, 0 one key.
        sink: share of all attention that one key takes, the one that takes most.
        prefix: share of class and register tokens.
        padding: share of padding; must be 0.
        distance: mean distance from patch to patch, in patches.
        divergence: mean Jensen–Shannon divergence from the other heads, in bits: 0 alike, 1 apart.
        static: mean Kendall τ of two queries' rankings of the keys that both see: 1 alike for all.
        uniform: of graphs, mean total variation distance from 1/degree, 0 to 1.
        high_norm: share of tokens behind the layer's block with a norm over 4 × their median.

        and of graphs `entropy_by_degree`: the entropy of nodes with 2, 3–4, 5–8, … edges.
    findings: what stands out, a sentence each.
    notes: what was drawn or assumed, a sentence each.
    accuracy, uniform_accuracy: of a graph model with labels, as it is and with 1/degree in the
        place of attention.
    """

    rows: list[dict[str, Any]]
    findings: list[str]
    notes: list[str] = field(default_factory=list)
    accuracy: float | None = None
    uniform_accuracy: float | None = None

    def __repr__(self) -> str:
        rows, heading = self.rows, "head"
        if len(rows) > MOST_ROWS:
            rows, heading = _layer_means(rows), "heads"
        shown = [name for name in MEASURES if any(row[name] is not None for row in rows)]
        table = [["layer", heading, *shown]]
        table += [
            [_name(row), str(row["head"]), *(_number(row[name]) for name in shown)] for row in rows
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                f"{cell:<{width}}" if place == 0 else f"{cell:>{width}}"
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in table
        ]
        if heading == "heads":
            lines.append("means over the heads of a layer; `rows` has each")
        return "\n".join([*lines, "", *self.findings, *self.notes])


def _layer_means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["layer"], row["call"], row["edge_type"]), []).append(row)
    means = []
    for heads in groups.values():
        known = {name: [row[name] for row in heads if row[name] is not None] for name in MEASURES}
        mean = {
            name: sum(values) / len(values) if values else None for name, values in known.items()
        }
        means.append({**heads[0], **mean, "head": len(heads)})
    return means


def _name(row: dict[str, Any]) -> str:
    words = [row["layer"] or "(itself)"]
    words += [f"call {row['call']}"] if row["call"] else []
    words += [" ".join(row["edge_type"])] if row["edge_type"] else []
    return ", ".join(words)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
