"""The section of a node: its edges as a drawing, fidelity, and the first edges as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnkit.interpret.graphs.ego import (
    AGAINST,
    FOR,
    NO_CLASS,
    OTHER,
    EgoGraph,
    class_colours,
    ego_graph,
    left_out,
    legend,
    width_samples,
)
from attnkit.interpret.graphs.fidelity import EdgeFidelity
from attnkit.interpret.report.curves import edge_curves
from attnkit.interpret.report.findings import Judged
from attnkit.interpret.report.page import Section, short
from attnkit.lightning.explained import Explained

_ROWS = 10
_SIZE = 100  # of the drawing's units in one of the layout's
_THIN, _WIDE = 0.7, 6.2
_STYLES = {FOR: "for", AGAINST: "against", OTHER: "other"}


def edge_sections(explained: Explained, found: Sequence[Judged]) -> list[Section]:
    """A section for each node, by the first method."""
    return [
        edge_section(f"Node {one.seen.index}", one.seen, one.trust, explained)
        for one in found
        if one.method == found[0].method
    ]


def edge_section(
    title: str, seen: Any, fidelity: EdgeFidelity | None, explained: Explained
) -> Section:
    """A node, or a graph: the drawing that `save` of its explanation makes.

    Its edges and nodes say what they are where one points at them or goes through them by the
    arrow keys.

    Args:
        title: of the section.
        fidelity: None: no curves.
        explained: `truth` colours the nodes where it is known, what the model predicts elsewhere.

    Raises:
        ValueError: classes not one a node.
    """

    def class_of(node: int) -> list[str]:
        """The name of a node's class, in a list that is empty where classes are not known."""
        if not classes:
            return []
        return ["not known" if classes[node] < 0 else explained.class_name(classes[node])]

    ego = ego_graph(seen.edges, seen.edge_index, seen.candidates, seen.index)
    classes = seen.unit.classes(explained.truth)
    kind = "predicted class" if explained.truth is None else "class"
    rows = seen.top(_ROWS)
    table: list[list[Any]] = [
        ["edge", *([f"{kind} of its source"] if classes else []), "value", "share", "steps"]
    ]
    for row in rows:
        edge, share = f"{row.source} → {row.target}", f"{100 * row.share:.0f} %"
        table.append([edge, *class_of(row.source), short(row.score), share, row.steps])
    first = ", ".join(f"{row.source} → {row.target} ({short(row.score)})" for row in rows[:3])
    what = "the graph" if seen.index is None else f"node {seen.index}"
    drawn = [classes[node.number] for node in ego.nodes] if classes else []
    colours = class_colours(drawn)
    letters = max(len(str(node.number)) for node in ego.nodes)
    size = min(6.0, 1.9 * _SIZE * ego.radius / (0.62 * letters + 0.4))
    nodes = []
    for node in ego.nodes:
        says = f"Node {node.number}" + "".join(f", {kind} {name}" for name in class_of(node.number))
        is_asked = node.number == seen.index
        nodes.append(
            {
                "x": round(_SIZE * node.x, 1),
                "y": round(-_SIZE * node.y, 1),
                "number": node.number,
                "fill": colours.get(classes[node.number], NO_CLASS) if classes else NO_CLASS,
                "is_asked": is_asked,
                "says": says + (": the node that was asked for." if is_asked else "."),
            }
        )
    widths = [
        {"style": _STYLES[colour], "width": round(_width(part), 1), "name": name}
        for colour, part, name in width_samples(ego)
    ]
    target, notes = explained.class_name(int(seen.target)), [left_out(ego)]
    if seen.share:
        notes.append(f"Self-loops that layers added took {100 * float(seen.share):.0f} %.")
    return {
        "kind": "graph",
        "title": title,
        "headline": seen.unit.headline(seen, explained.class_names),
        "alt": f"Edges that reach {what} by {seen.method}. First: {first}. {left_out(ego)}",
        "edges": _edges(ego, seen),
        "nodes": nodes,
        "radius": round(_SIZE * ego.radius, 1),
        "size": round(size, 1),
        "widths": {"title": f"{seen.method} of an edge", "samples": widths},
        "colours": {"title": kind, "samples": legend(colours, drawn, explained.class_names)},
        "curves": edge_curves(fidelity, target) if fidelity else [],
        "fidelity": str(fidelity) if fidelity else "",
        "table": table,
        "notes": [*notes, *seen.notes],
    }


def _edges(ego: EgoGraph, seen: Any) -> list[dict[str, Any]]:
    """The lines and heads of arrows; `rank` is 0 for the widest."""
    share = float(seen.share or 0.0)
    sizes = float(seen.edges.abs().sum()) / (1 - share) if share < 1 else 0.0
    ranked = sorted(ego.edges, key=lambda edge: -edge.width)
    rank = {edge.place: number for number, edge in enumerate(ranked)}
    edges = []
    for edge in ego.edges:
        start, *others = (_at(*point) for point in edge.curve)
        part = f", {100 * abs(edge.score) / sizes:.0f} % of all" if sizes else ""
        edges.append(
            {
                "style": _STYLES[edge.colour],
                "rank": rank[edge.place],
                "width": round(_width(edge.width), 2),
                "line": f"M{start}{'Q' if len(others) == 2 else 'C'}{' '.join(others)}",
                "head": f"M{'L'.join(_at(*point) for point in edge.head)}Z",
                "says": f"{edge.source} → {edge.target}: {seen.method} {short(edge.score)}{part}.",
            }
        )
    return edges


def _width(part: float) -> float:
    return _THIN + (_WIDE - _THIN) * part


def _at(x: float, y: float) -> str:
    return f"{_SIZE * x:.1f} {-_SIZE * y:.1f}"
