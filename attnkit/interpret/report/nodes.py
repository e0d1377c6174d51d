"""Nodes of a graph: a row for each node and method, and a part of the page for each node."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from attnkit.interpret.explain import explain
from attnkit.interpret.explanation import Explanation
from attnkit.interpret.graphs.fidelity import EdgeFidelity
from attnkit.interpret.methods.table import METHODS
from attnkit.interpret.page.graphs import graph_section
from attnkit.interpret.report.asked import Asked, Step
from attnkit.interpret.report.findings import Findings, Row, number
from attnkit.interpret.trust.agreement import spearman
from attnkit.lightning.explained import Explained

_DRAWS = {"fast": 20, "full": 200}
_CAPTION = (
    "p lost: drop of the class's probability without the first k edges, mean over k; "
    "random: the same for random edges, lowest to highest draw; "
    "p left: drop with the first k edges alone."
)


def explain_nodes(
    asked: Asked, explained: Explained, against: Explained | None, step: Step
) -> Findings:
    """Which edges each method gives most for each node, and how far the answer needs them."""
    seen: dict[tuple[int, str], Explanation] = {}
    other: dict[tuple[int, str], Explanation] = {}
    judged: dict[tuple[int, str], EdgeFidelity] = {}
    for node in asked.nodes:
        for method in asked.methods:
            key = node, method
            step(f"node {node}: {method}")
            seen[key] = explain(explained.model, explained.inputs, asked.target, method, index=node)
            if against is not None:
                other[key] = _against(against, seen[key])
            if asked.trust != "none" and int(seen[key].candidates.sum()) > 1:
                judged[key] = seen[key].fidelity(num_draws=_DRAWS[asked.trust], seed=asked.seed)
    rows = [_row(explained, one, judged.get(key), other.get(key)) for key, one in seen.items()]
    sections = []
    for node in asked.nodes:
        first = node, asked.methods[0]
        sections.append(_section(explained, f"Node {node}", seen[first], judged.get(first)))
        if first in other:
            title = f"Node {node}, by the other checkpoint"
            sections.append(_section(explained, title, other[first], None))
    return Findings(
        rows,
        {
            **_arrays(seen, "edges"),
            **_arrays(other, "against"),
            "edge_index": seen[asked.nodes[0], asked.methods[0]].edge_index.cpu().numpy(),
        },
        sections=sections,
        shown=_shown(rows),
        caption=_CAPTION if judged else "",
        said=[f"node {node}, {method}: {one}" for (node, method), one in judged.items()],
    )


def _against(against: Explained, seen: Explanation) -> Explanation:
    """The same class of the same node, by another model."""
    given = against.inputs[1]
    if not torch.equal(given, seen.edge_index):
        raise ValueError(
            f"against: expected a model of the same graph, got one of {given.shape[1]:,} edges"
        )
    target = int(seen.target) if METHODS[seen.method].has_target else None
    return explain(against.model, against.inputs, target, seen.method, index=seen.index)


def _row(
    explained: Explained,
    seen: Explanation,
    trust: EdgeFidelity | None,
    other: Explanation | None,
) -> Row:
    assert seen.index is not None
    row: dict[str, Any] = {
        "node": seen.index,
        "map": seen.method,
        "class": explained.class_name(int(seen.target)),
        "predicted": explained.class_name(int(seen.predicted)),
        "label": None,
        "probability": float(seen.probability),
        "edges": int(seen.candidates.sum()),
    }
    if explained.truth is not None:
        row["label"] = explained.class_name(int(explained.truth[seen.index]))
    if seen.share:
        row["self_loops_share"] = float(seen.share)
    if trust is not None:
        for name in ("plus", "random_plus", "random_plus_low", "random_plus_high"):
            row[f"fidelity_{name}"] = sum(one[name] for one in trust.rows) / len(trust.rows)
        for name in ("minus", "random_minus"):
            row[f"fidelity_{name}"] = sum(one[name] for one in trust.rows) / len(trust.rows)
        row["verdict"] = trust.verdict
    right = explained.true_edges(seen.index) if explained.true_edges else None
    if right is not None:
        row["auroc"] = _auroc(seen, right.to(seen.edges.device))
    if other is not None:
        both = (one.edges[seen.candidates][None, None] for one in (seen, other))
        row["spearman_against"] = float(spearman(*both)[0])
    return row


def _auroc(seen: Explanation, right: Tensor) -> float | None:
    """How well the numbers part the right edges from the others; ties count half."""
    scores, among = seen.edges[seen.candidates], right[seen.candidates]
    if not among.any() or among.all():
        return None
    ranks = scores.unique(return_inverse=True)[1].double()
    return float(binary_auroc(ranks / ranks.max().clamp(min=1), among.long()))


def _section(
    explained: Explained, title: str, seen: Explanation, trust: EdgeFidelity | None
) -> Any:
    return graph_section(title, seen, trust, explained.class_names, explained.truth)


def _shown(rows: list[Row]) -> list[list[str]]:
    more = {"AUROC": "auroc", "other\nmodel": "spearman_against"}
    more = {heading: name for heading, name in more.items() if any(name in row for row in rows)}
    table = [["node", "map", "class", "p", "edges", "p lost", "random", "p left"]]
    table[0] += more
    for row in rows:
        drawn = [number(row.get(f"fidelity_random_plus_{end}")) for end in ("low", "high")]
        cells = [
            str(row["node"]),
            str(row["map"]).replace("_", " "),
            str(row["class"]),
            number(row["probability"]),
            str(row["edges"]),
            number(row.get("fidelity_plus")),
            " to ".join(drawn) if drawn[0] else "",
            number(row.get("fidelity_minus")),
        ]
        table.append(cells + [number(row.get(name)) for name in more.values()])
    return table


def _arrays(seen: dict[tuple[int, str], Explanation], name: str) -> dict[str, np.ndarray]:
    """Numbers of the edges by node and method, [edges]."""
    return {
        f"{name}_{node}_{method}": one.edges.cpu().numpy() for (node, method), one in seen.items()
    }
