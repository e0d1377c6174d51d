"""What a page shows of a node: its edges as a drawing, fidelity, and the first edges as rows."""

from collections.abc import Sequence

from torch import Tensor

from attnkit.interpret.explanation import Explanation
from attnkit.interpret.graphs.ego import (
    AGAINST,
    FOR,
    NO_CLASS,
    OTHER,
    DrawnEdge,
    DrawnNode,
    EgoGraph,
    class_colours,
    ego_graph,
    left_out,
    legend,
)
from attnkit.interpret.graphs.fidelity import EdgeFidelity
from attnkit.interpret.page.fidelity import fidelity_curves
from attnkit.interpret.page.html import escaped, short, table_html
from attnkit.interpret.page.section import Section, Table

_ROWS = 10
_SIZE = 100  # of the drawing's units in one of the layout's
_KINDS = {FOR: "for", AGAINST: "against", OTHER: "other"}


def graph_section(
    title: str,
    seen: Explanation,
    fidelity: EdgeFidelity | None = None,
    class_names: Sequence[str] = (),
    labels: Tensor | None = None,
) -> Section:
    """A node, or a graph: the drawing that `Explanation.save` makes, whose edges and nodes say
    what they are where one points at them or goes through them by the arrow keys.

    Args:
        title: of the section.
        fidelity: None: no curves.
        class_names: of the classes; without them their numbers.
        labels: as of `Explanation.save`.

    Raises:
        ValueError: labels not one a node.
    """
    ego = ego_graph(seen.edges, seen.edge_index, seen.candidates, seen.index)
    classes = seen.classes(labels)
    kind = "predicted class" if labels is None else "class"
    rows = seen.top(_ROWS)
    cells = [
        [f"{row.source} → {row.target}", *_named(classes, class_names, row.source),
         short(row.score), f"{row.share:.0%}", row.steps]
        for row in rows
    ]  # fmt: skip
    header = ["edge", *([f"{kind} of its source"] if classes else []), "value", "share", "steps"]
    first = ", ".join(f"{row.source} → {row.target} ({short(row.score)})" for row in rows[:3])
    what = "the graph" if seen.index is None else f"node {seen.index}"
    alt = f"Edges that reach {what} by {seen.method}. First: {first}. {left_out(ego)}"
    drawing = _svg(ego, seen, classes, class_names, kind, alt)
    curves = "" if fidelity is None else fidelity_curves(fidelity)
    sentence = "" if fidelity is None else f"<p>{escaped(fidelity)}</p>"
    notes = "".join(f'<p class="note">{escaped(note)}</p>' for note in _notes(seen, ego))
    html = f"""<p>{escaped(seen.headline(class_names))}</p>
<div class="graph"><figure>{drawing}
<p class="said" aria-live="polite">Point at an edge or a node; or choose the drawing with the \
Tab key, and go through them by the arrow keys.</p>
{_legend(ego, seen.method, _drawn(ego, classes), class_names, kind)}
</figure><div>{curves}</div></div>
{sentence}
{table_html(Table(header, cells))}
{notes}"""
    return Section(title, html, script="graph")


def _svg(
    ego: EgoGraph,
    seen: Explanation,
    classes: list[int],
    names: Sequence[str],
    kind: str,
    alt: str,
) -> str:
    ranked = sorted(ego.edges, key=lambda edge: -edge.width)
    rank = {edge.place: number for number, edge in enumerate(ranked)}
    share = 0.0 if seen.share is None else float(seen.share)
    sizes = float(seen.edges.abs().sum()) / (1 - share) if share < 1 else 0.0
    edges = "".join(_edge(edge, rank[edge.place], seen.method, sizes) for edge in ego.edges)
    colours = class_colours(_drawn(ego, classes))
    letters = max(len(str(node.number)) for node in ego.nodes)
    size = min(6.0, 1.9 * _SIZE * ego.radius / (0.62 * letters + 0.4))
    nodes = []
    for order, node in enumerate(ego.nodes):
        fill = colours.get(classes[node.number], NO_CLASS) if classes else NO_CLASS
        words = f"Node {node.number}"
        words += f", {kind} {_named(classes, names, node.number)[0]}" if classes else ""
        is_asked = node.number == seen.index
        words += ": the node that was asked for." if is_asked else "."
        nodes.append(_node(node, ego.radius, size, fill, words, len(ranked) + order, is_asked))
    return (
        f'<svg class="ego" viewBox="-116 -116 232 232" role="img" tabindex="0" '
        f'aria-label="{escaped(alt)}">{edges}{"".join(nodes)}</svg>'
    )


def _edge(edge: DrawnEdge, rank: int, method: str, sizes: float) -> str:
    letter = "Q" if len(edge.curve) == 3 else "C"
    start, *others = (_at(*point) for point in edge.curve)
    width = 0.7 + 5.5 * edge.width
    share = f", {abs(edge.score) / sizes:.0%} of all" if sizes else ""
    words = f"{edge.source} → {edge.target}: {method} {short(edge.score)}{share}."
    return (
        f'<g class="edge {_KINDS[edge.colour]}" data-rank="{rank}"><title>{words}</title>'
        f'<path class="wide" d="M{start}{letter}{" ".join(others)}"/>'
        f'<path class="line" stroke-width="{width:.2f}" d="M{start}{letter}{" ".join(others)}"/>'
        f'<path class="head" d="M{"L".join(_at(*point) for point in edge.head)}Z"/></g>'
    )


def _node(
    node: DrawnNode,
    radius: float,
    size: float,
    fill: str,
    words: str,
    rank: int,
    is_asked: bool,
) -> str:
    x, y = _at(node.x, node.y).split()
    r = _SIZE * radius
    ring = f'<circle class="ring" cx="{x}" cy="{y}" r="{1.35 * r:.1f}"/>' if is_asked else ""
    return (
        f'<g class="node" data-rank="{rank}"><title>{escaped(words)}</title>{ring}'
        f'<circle cx="{x}" cy="{y}" r="{r:.1f}" fill="{fill}"/>'
        f'<text x="{x}" y="{y}" font-size="{size:.1f}">{node.number}</text></g>'
    )


def _legend(ego: EgoGraph, method: str, drawn: list[int], names: Sequence[str], kind: str) -> str:
    """The widths of edges with their numbers, and the colours of classes."""
    items = [f"<b>{escaped(method)} of an edge</b>"]
    for sign in sorted({1 if edge.score >= 0 else -1 for edge in ego.edges if edge.width})[::-1]:
        for part in (1.0, 0.5):
            name, number = ("for" if sign > 0 else "against"), sign * part * ego.largest
            items.append(f"{_sample(name, 0.7 + 5.5 * part)} {short(number)}")
    items.append(f"{_sample('other', 0.7)} other edges")
    lines = [items]
    if drawn:
        dots = [
            f'<svg class="dot" viewBox="-6 -6 12 12" aria-hidden="true"><circle r="5" '
            f'fill="{colour}"/></svg> {escaped(name)}'
            for name, colour in legend(class_colours(drawn), drawn, names)
        ]
        lines.append([f"<b>{kind}</b>", *dots])
    return "".join(
        f'<p class="note legend">{"".join(f"<span>{item}</span>" for item in line)}</p>'
        for line in lines
    )


def _sample(kind: str, width: float) -> str:
    return (
        f'<svg class="sample {kind}" viewBox="0 -4 16 8" aria-hidden="true">'
        f'<path class="line" stroke-width="{width:.1f}" d="M0 0H16"/></svg>'
    )


def _notes(seen: Explanation, ego: EgoGraph) -> list[str]:
    said = [left_out(ego)]
    if seen.share:
        said.append(f"Self-loops that layers added took {float(seen.share):.0%}.")
    return [*said, *seen.notes]


def _drawn(ego: EgoGraph, classes: list[int]) -> list[int]:
    return [classes[node.number] for node in ego.nodes] if classes else []


def _named(classes: list[int], names: Sequence[str], node: int) -> list[str]:
    """The name of a node's class, in a list that is empty where classes are not known at all."""
    if not classes:
        return []
    one = classes[node]
    if one < 0:
        return ["not known"]
    return [names[one] if one < len(names) else str(one)]


def _at(x: float, y: float) -> str:
    return f"{_SIZE * x:.1f} {-_SIZE * y:.1f}"
