"""Page sections of nodes, pairs or graphs: a drawing of edges, fidelity, and a table of edges."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from attnkit.interpret.graph_picture import (
    AGAINST,
    FOR,
    INK,
    OTHER,
    SOFT,
    draw_fidelity,
    draw_graph,
    ego_graph,
    empty_figure,
)
from attnkit.interpret.report.findings import Judged
from attnkit.interpret.report.page import Section, short
from attnkit.interpret.trust.edges import EdgeFidelity
from attnkit.lightning.protocols import Explained

_ROWS = 10
_COLOURS = {FOR: "mark", AGAINST: "accent", OTHER: "other", SOFT: "soft", INK: "ink"}
"""The style sheet's variables that replace the colours of a drawing."""


def edge_sections(explained: Explained, found: Sequence[Judged]) -> list[Section]:
    """Return a section for each node, pair or graph, with the first method's explanation."""
    sections = []
    for one in found:
        if one.method != found[0].method:
            continue
        if explained.graphs is None:
            nodes = ", ".join(map(str, one.seen.unit.target.nodes))
            title = f"{explained.kind[:-1].capitalize()} {nodes}"
            sections.append(edge_section(title, one.seen, one.trust, explained))
            continue
        title = f"Graph {explained.graphs[one.place]}"
        title += f", {explained.names[one.place]}" if explained.names else ""
        section = edge_section(title, one.seen, one.trust, replace(explained, truth=None))
        if explained.truth is not None:
            right = explained.class_name(int(explained.truth[one.place]))
            section["headline"] += f"; its class is {right}"
        sections.append(section)
    return sections


def edge_section(
    title: str, seen: Any, fidelity: EdgeFidelity | None, explained: Explained
) -> Section:
    """Return the section of a node, pair or graph, with the drawing that its explanation saves.

    The page describes an edge or node when the user points at it or selects it by arrow keys.

    Args:
        title: title of the section.
        fidelity: fidelity whose curves are drawn; None: no curves.
        explained: `truth` colours the nodes if it is known, otherwise the model's predictions do.

    Raises:
        ValueError: classes that are not one for each node.
    """

    def class_of(node: int) -> list[str]:
        """Return the name of a node's class as a list, which is empty if classes are not known."""
        if not classes:
            return []
        return [explained.class_name(classes[node])]

    ego = ego_graph(seen.edges, seen.edge_index, seen.candidates, seen.index)
    classes = seen.unit.classes(explained.truth)
    kind = "predicted class" if explained.truth is None else "class"
    rows = seen.top(_ROWS)
    of_source = [f"{kind} of its source"] * bool(classes)
    table: list[list[Any]] = [["edge", *of_source, "value", "share", "steps"]]
    for row in rows:
        edge, share = f"{row.source} → {row.target}", f"{100 * row.share:.0f} %"
        table.append([edge, *class_of(row.source), short(row.score), share, row.steps])
    if seen.index is None:
        table = [row[:-1] for row in table]  # without a node there are no steps to it
    says = []
    for one in ego.edges:
        part = f", {100 * seen.unit.part(one.score):.0f} % of all"
        says.append(f"{one.source} → {one.target}: {seen.method} {short(one.score)}{part}.")
    for node in ego.nodes:
        parts = [f"Node {node.number}", *(f"{kind} {name}" for name in class_of(node.number))]
        is_asked = ": the node that was asked for" * (node.number in ego.asked)
        says.append(f"{', '.join(parts)}{is_asked}.")
    figure = empty_figure(4.4, 5.4)
    draw_graph(
        figure.subplots(),
        ego,
        classes,
        explained.class_names,
        method=f"{seen.method} of an edge",
        classes_are=kind,
    )
    which = "The edges" if seen.index is None else f"Edges that reach {title.lower()}"
    first = ", ".join(f"{row.source} → {row.target} ({short(row.score)})" for row in rows[:3])
    notes = list(seen.notes)
    if seen.share:
        notes.insert(0, f"Self-loops that layers added took {100 * float(seen.share):.0f} %.")
    return {
        "kind": "graph",
        "title": title,
        "headline": seen.unit.headline(seen, explained.class_names),
        "alt": f"{which} by {seen.method}. First: {first}. {ego}",
        "drawing": _inline(figure),
        "says": says,
        "curves": _curves(fidelity, explained.class_name(int(seen.target))) if fidelity else None,
        "fidelity": str(fidelity) if fidelity else "",
        "table": table,
        "notes": notes,
    }


def _curves(fidelity: EdgeFidelity, target: str) -> dict[str, Any]:
    """Return the drawing of the fidelity curves, and their numbers in words."""
    figure = empty_figure(3.3, 5.2)
    draw_fidelity(figure.subplots(2), fidelity, target)
    symbol = fidelity.quantity.symbol
    said = [f"{symbol}({target}) with all edges is {fidelity.probability:.2f}"]
    for name, which in (("plus", "without the first k edges"), ("minus", "with these alone")):
        ys = (
            f"{fidelity.probability - row[name]:.2f} at k = {row['k']:g}" for row in fidelity.rows
        )
        said.append(f"{which}: {', '.join(ys)}")
    return {"alt": "; ".join(said), "drawing": _inline(figure)}


def _inline(figure: Figure) -> str:
    """Return a drawing as SVG with escaped texts, in the colours of the light or dark page."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "page"}):
        figure.savefig(file, format="svg", transparent=True, bbox_inches="tight", metadata=nothing)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, name in _COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    # matplotlib's ids are the same in every drawing of the page
    return re.sub(r' id="[\w.]*_\d+"', "", svg).replace(' id="rank', ' data-rank="')
