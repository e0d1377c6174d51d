"""Drawings of a node's or graph's edges, and of the curves of their fidelity."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch
from torch import Tensor

from attnkit.interpret.methods.graph_question import Index, nodes_of, steps_to
from attnkit.interpret.trust.edges import EdgeFidelity
from attnkit.lightning.console import in_picture

MOST_RANKED, MOST_EDGES = 24, 120
MOST_OF_GRAPH = 400  # a graph with fewer edges is drawn whole
LEAST = 1e-4  # a smaller share of the largest number may be rounding, whose sign means nothing
# the soft colours of ColorBrewer's Set3 without its grey, on which black numbers are legible
CLASS_COLOURS = (
    "#8dd3c7", "#fdb462", "#bebada", "#b3de69", "#80b1d3", "#fccde5", "#ffed6f", "#bc80bd",
    "#ccebc5", "#fb8072", "#ffffb3",
)  # fmt: skip
NO_CLASS, ON_CLASS = "#ffffff", "#1d1f24"
FOR, AGAINST, OTHER, SOFT, INK = "#c2410c", "#2166ac", "#b4b8c0", "#5b6068", "#000000"
"""Colours of edges and of the texts about them."""
_THIN, _WIDE = 0.8, 7.0  # points
_LETTERS = 70  # letters of class names in a line of the legend


class DrawnNode(NamedTuple):
    """A node at x and y, each from −1 to 1."""

    number: int
    x: float
    y: float


class DrawnEdge(NamedTuple):
    """An arrow.

    place: its column of `edge_index`.
    width: its number over the largest, 0 to 1; 0 for an edge that is drawn in grey.
    """

    place: int
    source: int
    target: int
    score: float
    width: float

    @property
    def colour(self) -> str:
        if not self.width:
            return OTHER
        return FOR if self.score >= 0 else AGAINST


class EgoGraph(NamedTuple):
    """The part of a graph that is drawn.

    asked: the explained nodes.
    nodes: the drawn nodes, in the order of their numbers.
    edges: the drawn edges, the widest first.
    largest: absolute value of the number whose edge is widest.
    num_ranked: number of edges that are drawn as wide as their value.
    num_left_out: number of edges that can reach the node and are not drawn.
    """

    asked: list[int]
    nodes: list[DrawnNode]
    edges: list[DrawnEdge]
    largest: float
    num_ranked: int
    num_left_out: int

    @property
    def radius(self) -> float:
        """The radius of a node in the layout, which goes from −1 to 1."""
        return min(0.085, 0.3 / math.sqrt(len(self.nodes)))

    def __str__(self) -> str:
        """Return a sentence on how the edges are drawn."""
        others = len(self.edges) - self.num_ranked
        parts = [f"{self.num_ranked} edges as wide as their value"]
        if others:
            parts.append(f"{others} other{'s' * (others > 1)} in grey")
        if self.num_left_out:
            parts.append(f"{self.num_left_out} not drawn")
        return ", ".join(parts) + "."


def ego_graph(
    scores: Tensor,
    edge_index: Tensor,
    candidates: Tensor,
    index: Index,
    most: int = MOST_RANKED,
) -> EgoGraph:
    """Choose and lay out what is drawn of a graph.

    Drawn are the `most` edges with the largest numbers and a path from each to the node, and in
    grey other edges between these nodes, up to `MOST_EDGES`. Without a node, all edges of a graph
    with at most `MOST_OF_GRAPH` are drawn. The layout is that of Kamada and Kawai (1989). It starts
    from circles by the number of steps to the node and is deterministic.
    """
    scores, edge_index = scores.detach().double().cpu(), edge_index.cpu()
    places = candidates.cpu().nonzero()[:, 0]
    places = places[scores[places].abs().argsort(descending=True, stable=True)]
    first = places[:most].tolist()
    largest = float(scores[first].abs().max()) if first else 0.0
    ends = edge_index.T.tolist()
    steps = steps_to(index, edge_index).tolist()
    taken = dict.fromkeys([*first, *_ways(first, places.tolist(), ends, steps)])
    nodes = {end for place in taken for end in ends[place]} | {*nodes_of(index)}
    limit = MOST_EDGES
    if index is None and len(ends) <= MOST_OF_GRAPH:
        limit, nodes = MOST_OF_GRAPH, {end for pair in ends for end in pair}
    inside = [p for p in places.tolist() if p not in taken and nodes.issuperset(ends[p])]
    drawn = [*taken, *inside][: max(limit, len(taken))]
    at = _layout(sorted(nodes), [ends[place] for place in drawn], index, steps)
    edges = []
    for number, place in enumerate(drawn):
        score = float(scores[place])
        is_ranked = number < len(first) and abs(score) > LEAST * largest
        width = abs(score) / largest if is_ranked else 0.0
        source, target = ends[place]
        edges.append(DrawnEdge(place, source, target, score, width))
    return EgoGraph(
        nodes_of(index),
        [DrawnNode(node, *at[node]) for node in sorted(nodes)],
        sorted(edges, key=lambda edge: -edge.width),
        largest,
        sum(edge.width > 0 for edge in edges),
        len(places) - len(drawn),
    )


def empty_figure(width: float, height: float) -> Figure:
    """Return a figure of this size in inches, whose panels leave room for their legends."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    return figure


def draw_graph(
    panel: Axes,
    ego: EgoGraph,
    classes: Sequence[int],
    names: Sequence[str],
    *,
    method: str,
    classes_are: str,
) -> None:
    """Draw nodes and edges, the scale of widths and the colours of classes.

    In an SVG their groups are called `rank0`, `rank1`, …: first edges, then nodes, both in the
    order of `ego`.

    Args:
        classes: class of each node of the graph, −1 if it is not known; empty: no colours.
        names: names of the classes; empty: their numbers.
        method: title of the scale of widths in the legend.
        classes_are: title of the classes in the legend.
    """
    panel.set(aspect="equal", xlim=(-1.14, 1.14), ylim=(-1.14, 1.14))
    panel.axis("off")
    drawn = [classes[node.number] for node in ego.nodes] if len(classes) else []
    colours = class_colours(drawn)
    letters = max(len(str(node.number)) for node in ego.nodes)
    font_size = min(9.0, 290 * ego.radius / (0.62 * letters + 0.4))
    circles = {}
    for rank, node in enumerate(ego.nodes, len(ego.edges)):
        is_asked = node.number in ego.asked
        if is_asked:
            ring = Circle((node.x, node.y), 1.35 * ego.radius, fill=False, ec=INK, lw=1.6, zorder=3)
            panel.add_patch(ring)
        colour = colours.get(classes[node.number], NO_CLASS) if len(classes) else NO_CLASS
        circles[node.number] = Circle(
            (node.x, node.y), ego.radius, fc=colour, ec=ON_CLASS, lw=1.6 if is_asked else 0.7,
            zorder=3, gid=f"rank{rank}",
        )  # fmt: skip
        panel.add_patch(circles[node.number])
        panel.text(
            node.x, node.y, str(node.number), ha="center", va="center_baseline", zorder=4,
            color=ON_CLASS, fontsize=font_size, weight="bold" if is_asked else "normal",
        )  # fmt: skip
    _edges(panel, ego, circles)
    style: dict[str, Any] = {"fontsize": 8, "title_fontsize": 8, "frameon": False}
    style |= {
        "columnspacing": 1.2,
        "handlelength": 1.5,
        "alignment": "left",
        "loc": "upper left",
        "borderaxespad": 0,
    }
    lines = _scale(ego)
    widths = panel.legend(
        handles=lines, title=method, bbox_to_anchor=(0, 0), ncols=len(lines), **style
    )
    if shown := legend(colours, drawn, names):
        panel.add_artist(widths)
        look: dict[str, Any] = {"ls": "", "marker": "o", "ms": 8, "mec": ON_CLASS, "mew": 0.7}
        dots = [
            Line2D([], [], mfc=colour, label=in_picture(name), **look) for name, colour in shown
        ]
        ncols = max(1, min(6, _LETTERS // (6 + max(len(name) for name, _ in shown))))
        panel.legend(
            handles=dots, title=classes_are, bbox_to_anchor=(0, -0.085), ncols=ncols, **style
        )
    panel.text(0, 1, str(ego), transform=panel.transAxes, fontsize=8, color=SOFT, va="bottom")


def draw_fidelity(panels: Sequence[Axes], fidelity: EdgeFidelity, name: str) -> None:
    """Draw two curves over k: p without the first k edges, and p with only these.

    Args:
        name: name of the class.
    """
    ks = [int(row["k"]) for row in fidelity.rows]
    p = fidelity.probability

    def left(key: str) -> np.ndarray:
        return p - np.array([row[key] for row in fidelity.rows])

    plus, minus = panels
    for panel, kind, title in (
        (plus, "plus", "without the first k edges (fidelity₊)"),
        (minus, "minus", "with these alone (fidelity₋)"),
    ):
        panel.fill_between(
            ks, left(f"random_{kind}_low"), left(f"random_{kind}_high"), color=OTHER, alpha=0.45,
            lw=0, label=f"{fidelity.num_draws} random orders",
        )  # fmt: skip
        panel.plot(ks, left(f"random_{kind}"), color=SOFT, lw=1.2, label="mean of these")
        panel.plot(ks, left(kind), color=FOR, lw=2, marker="o", ms=4, label="edges as ranked")
        panel.axhline(p, color=INK, lw=0.8, ls=(0, (4, 3)), label="all edges")
        panel.set_title(title, fontsize=9, loc="left")
        panel.set_ylabel(in_picture(f"{fidelity.quantity.symbol}({name})"), fontsize=8)
        panel.set_xscale("log" if ks[-1] > 2 else "linear")
        if fidelity.quantity.symbol == "p":
            panel.set_ylim(-0.03, 1.03)
        panel.set_xticks(ks, [str(k) for k in ks])
        panel.minorticks_off()
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    minus.set_xlabel("k, edges", fontsize=8)
    minus.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(-0.02, -0.2), ncols=2)


def class_colours(classes: Sequence[int]) -> dict[int, str]:
    """Return a colour for each class; classes below 0 are unknown and get none.

    If the class numbers are few, each has its own colour, so that drawings agree; otherwise only
    the most frequent classes get colours.
    """
    known = [one for one in classes if one >= 0]
    if max(known, default=0) < len(CLASS_COLOURS):
        return {one: CLASS_COLOURS[one] for one in sorted(set(known))}
    ordered = sorted(set(known), key=lambda one: (-known.count(one), one))
    return dict(zip(ordered, CLASS_COLOURS, strict=False))


def legend(
    colours: dict[int, str], classes: Iterable[int], names: Sequence[str]
) -> list[tuple[str, str]]:
    """Return names and colours of the classes of the drawn nodes."""
    classes = set(classes)
    shown = [
        (names[one] if one < len(names) else str(one), colour) for one, colour in colours.items()
    ]
    if any(one >= 0 and one not in colours for one in classes):
        shown.append(("another", NO_CLASS))
    elif min(classes, default=0) < 0:
        shown.append(("not known", NO_CLASS))
    return shown


def _edges(panel: Axes, ego: EgoGraph, circles: dict[int, Circle]) -> None:
    """Draw arrows from rim to rim, the widest on top; a loop is drawn above its node."""
    pairs = Counter((edge.source, edge.target) for edge in ego.edges)
    seen: Counter[tuple[int, int]] = Counter()
    for rank, edge in enumerate(ego.edges):
        ends = edge.source, edge.target
        # a single edge is straight; reverse and repeated edges are bent apart
        bend = 0.16 * (seen[ends] + (ends[::-1] in pairs))
        seen[ends] += 1
        start, end = (np.array(circles[node].center) for node in ends)
        if edge.source == edge.target:
            aside = ego.radius * math.sqrt(0.5)
            start, end = start + np.array([-aside, aside]), end + aside
            bend = -1.5 - 5 * bend
        else:  # where the arc crosses the rims; matplotlib's own clipping takes 40 ms an edge
            across = end - start
            control = (start + end) / 2 + bend * np.array([across[1], -across[0]])
            start, end = (
                one + ego.radius * (control - one) / np.linalg.norm(control - one)
                for one in (start, end)
            )
        width = _points(edge.width)
        arrow = FancyArrowPatch(
            tuple(start), tuple(end), shrinkA=0, shrinkB=0, fc=edge.colour, lw=0,
            connectionstyle=f"arc3,rad={bend}", zorder=1 + edge.width, gid=f"rank{rank}",
            arrowstyle=f"simple,tail_width={width},head_width={5 + 1.6 * width},"
            f"head_length={6 + 0.8 * width}",
        )  # fmt: skip
        panel.add_artist(arrow)  # add_patch would update the data limits, which are set already


def _points(width: float) -> float:
    return _THIN + (_WIDE - _THIN) * width


def _scale(ego: EgoGraph) -> list[Line2D]:
    """Return legend lines for the largest number and half of it, for each sign that occurs."""
    lines = [Line2D([], [], color=OTHER, lw=_THIN, label="other edges")]
    for sign, colour in ((-1, AGAINST), (1, FOR)):
        if any(edge.colour == colour for edge in ego.edges):
            for width in (0.5, 1.0):
                number = f"{sign * width * ego.largest:.3g}".replace("-", "−")
                lines.append(Line2D([], [], color=colour, lw=_points(width), label=number))
    return lines[::-1]


def _ways(
    ranked: list[int], places: list[int], ends: list[list[int]], steps: list[int]
) -> list[int]:
    """Return the edges of a shortest path from each ranked edge to the node.

    Of several shortest paths it takes the edges that come first in `places`, which is sorted by
    size.
    """
    # the first of the places stays, since it comes last
    steps_of = {place: [steps[node] for node in ends[place]] for place in places}
    onward = {ends[p][0]: p for p in places[::-1] if steps_of[p][0] == steps_of[p][1] + 1}
    ways = []
    for place in ranked:
        node = ends[place][1]
        while node in onward:
            ways.append(onward[node])
            node = ends[onward[node]][1]
    return ways


def _layout(
    nodes: list[int], edges: list[list[int]], index: Index, steps: list[int]
) -> dict[int, tuple[float, float]]:
    """Return the positions of the nodes, from −1 to 1 in both directions."""
    network = nx.Graph()
    network.add_nodes_from(nodes)
    network.add_edges_from(edges)
    if len(nodes) == 1:
        return {nodes[0]: (0.0, 0.0)}
    if index is not None:
        # nodes that no edge leads from are the farthest
        far = {n: steps[n] if steps[n] >= 0 else len(steps) for n in nodes}
        shells = [[n for n in nodes if far[n] == one] for one in sorted(set(far.values()))]
        found = nx.kamada_kawai_layout(network, pos=nx.shell_layout(network, shells))
    elif nx.is_connected(network):
        found = nx.kamada_kawai_layout(network)
    else:
        found = nx.spring_layout(network, seed=0)
    array = np.array([found[node] for node in nodes])
    array = array - (array.max(axis=0) + array.min(axis=0)) / 2
    array = array / (np.abs(array).max() or 1.0)
    return {node: (float(x), float(y)) for node, (x, y) in zip(nodes, array, strict=True)}
