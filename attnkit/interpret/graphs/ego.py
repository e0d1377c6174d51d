"""The drawing of a node and the edges that reach it: what is shown, where, and how wide."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import networkx as nx
import numpy as np
from torch import Tensor

from attnkit.interpret.graphs.table import steps_to

MOST_RANKED, MOST_EDGES = 24, 120
LEAST = 1e-4  # of the largest number: what is less may be rounding, whose sign says nothing
# the soft colours of ColorBrewer's Set3 without its grey, on which black numbers are legible
CLASS_COLOURS = (
    "#8dd3c7", "#fdb462", "#bebada", "#b3de69", "#80b1d3", "#fccde5", "#ffed6f", "#bc80bd",
    "#ccebc5", "#fb8072", "#ffffb3",
)  # fmt: skip
NO_CLASS = "#ffffff"
FOR, AGAINST, OTHER = "#c2410c", "#2166ac", "#b4b8c0"


Point = tuple[float, float]


class DrawnNode(NamedTuple):
    """A node at x and y, each from −1 to 1."""

    number: int
    x: float
    y: float


class DrawnEdge(NamedTuple):
    """An edge as a curve: a quadratic Bézier curve of three points, a loop as a cubic one of four.

    place: its column of `edge_index`.
    width: of its number over the largest, 0 to 1; 0 of an edge that is drawn as one of the others.
    curve: from the rim of the source to the base of the arrow's head.
    head: the three corners of the arrow's head, the first at the rim of the target.
    """

    place: int
    source: int
    target: int
    score: float
    width: float
    curve: list[Point]
    head: list[Point]

    @property
    def colour(self) -> str:
        if not self.width:
            return OTHER
        return FOR if self.score >= 0 else AGAINST


class EgoGraph(NamedTuple):
    """What is drawn of a graph.

    nodes, edges: edges that rank first last, so that they lie above the others.
    radius: of a node.
    largest: the size of the number whose edge is widest.
    num_ranked: how many edges are drawn as wide as their value.
    num_left_out: how many edges that can reach the node are not drawn.
    """

    nodes: list[DrawnNode]
    edges: list[DrawnEdge]
    radius: float
    largest: float
    num_ranked: int
    num_left_out: int


def ego_graph(
    scores: Tensor,
    edge_index: Tensor,
    candidates: Tensor,
    index: int | None,
    most: int = MOST_RANKED,
) -> EgoGraph:
    """The edges of the largest numbers, a way from each to the node, and, as the others, the edges
    between the nodes that are then there, up to `MOST_EDGES`.

    The layout is that of Kamada and Kawai (1989) from circles by steps to the node, without chance.
    """
    scores, edge_index = scores.detach().double().cpu(), edge_index.cpu()
    places = candidates.cpu().nonzero()[:, 0]
    places = places[scores[places].abs().argsort(descending=True, stable=True)]
    first = places[:most].tolist()
    largest = float(scores[first].abs().max()) if first else 0.0
    ranked = [place for place in first if abs(float(scores[place])) > LEAST * largest]
    ends = edge_index.T.tolist()
    steps = None
    if index is not None:
        number = max(int(edge_index.max()), index) + 1
        steps = steps_to(index, edge_index[:, places], number).tolist()
    ways = _ways(first, places.tolist(), ends, steps)
    nodes = {end for place in [*first, *ways] for end in ends[place]}
    if index is not None:
        nodes.add(index)
    taken = {*first, *ways}
    inside = [p for p in places.tolist() if p not in taken and nodes.issuperset(ends[p])]
    drawn = [*first, *ways, *inside][: max(MOST_EDGES, len(taken))]
    at = _layout(sorted(nodes), [ends[place] for place in drawn], index, steps)
    radius = min(0.085, 0.3 / math.sqrt(len(nodes)))
    is_ranked, bends, edges = set(ranked), _bends([ends[place] for place in drawn]), []
    for place, bend in zip(drawn, bends, strict=True):
        source, target = ends[place]
        score = float(scores[place])
        width = abs(score) / largest if place in is_ranked else 0.0
        curve, head = _curve(at[source], at[target], bend, radius, width)
        edges.append(DrawnEdge(place, source, target, score, width, curve, head))
    return EgoGraph(
        [DrawnNode(node, *at[node]) for node in sorted(nodes)],
        sorted(edges, key=lambda edge: edge.width),
        radius,
        largest,
        len(ranked),
        len(places) - len(drawn),
    )


def class_colours(classes: Sequence[int]) -> dict[int, str]:
    """A colour for each class: its own where the classes are few, so that drawings agree; else for
    the most frequent. A class below 0 is one that is not known."""
    known = [one for one in classes if one >= 0]
    if max(known, default=0) < len(CLASS_COLOURS):
        return {one: CLASS_COLOURS[one] for one in sorted(set(known))}
    ordered = sorted(set(known), key=lambda one: (-known.count(one), one))
    return dict(zip(ordered, CLASS_COLOURS, strict=False))


def legend(
    colours: dict[int, str], classes: Iterable[int], names: Sequence[str]
) -> list[tuple[str, str]]:
    """Names and colours of the classes of the nodes that are drawn."""
    classes = set(classes)
    shown = [
        (names[one] if one < len(names) else str(one), colour) for one, colour in colours.items()
    ]
    if any(one >= 0 and one not in colours for one in classes):
        shown.append(("another", NO_CLASS))
    elif min(classes, default=0) < 0:
        shown.append(("not known", NO_CLASS))
    return shown


def width_samples(ego: EgoGraph) -> list[tuple[str, float, str]]:
    """What a legend says of widths: colours, widths from 0 to 1, and the numbers they stand for."""
    signs = sorted({1 if edge.score >= 0 else -1 for edge in ego.edges if edge.width})[::-1]
    samples = [
        (FOR if sign > 0 else AGAINST, width, f"{sign * width * ego.largest:.3g}".replace("-", "−"))
        for sign in signs
        for width in (1.0, 0.5)
    ]
    return [*samples, (OTHER, 0.0, "other edges")]


def left_out(ego: EgoGraph) -> str:
    """Which edges are drawn how, in a sentence."""
    others = len(ego.edges) - ego.num_ranked
    parts = [f"{ego.num_ranked} edges as wide as their value"]
    if others:
        parts.append(f"{others} other{'s' * (others > 1)} in grey")
    if ego.num_left_out:
        parts.append(f"{ego.num_left_out} not drawn")
    return ", ".join(parts) + "."


def _ways(
    ranked: list[int], places: list[int], ends: list[list[int]], steps: list[int] | None
) -> list[int]:
    """Edges that lead from those that rank first to the node, of the shortest ways those with the
    largest numbers, which come first in `places`."""
    if steps is None:
        return []
    onward: dict[int, int] = {}
    for place in places:
        source, target = ends[place]
        if steps[source] == steps[target] + 1:
            onward.setdefault(source, place)
    ways: dict[int, None] = {}
    for place in ranked:
        node = ends[place][1]
        while node in onward and onward[node] not in ways:
            ways[onward[node]] = None
            node = ends[onward[node]][1]
    taken = set(ranked)
    return [place for place in ways if place not in taken]


def _layout(
    nodes: list[int], edges: list[list[int]], index: int | None, steps: list[int] | None
) -> dict[int, Point]:
    """Places from −1 to 1 in both directions."""
    network = nx.Graph()
    network.add_nodes_from(nodes)
    network.add_edges_from(edges)
    if len(nodes) == 1:
        return {nodes[0]: (0.0, 0.0)}
    if index is not None and steps is not None:
        shells = [[n for n in nodes if steps[n] == far] for far in range(max(steps) + 1)]
        found = nx.shell_layout(network, [shell for shell in shells if shell])
        found = nx.kamada_kawai_layout(network, pos=found)
    else:
        found = nx.spring_layout(network, seed=0)
    array = np.array([found[node] for node in nodes])
    array = array - (array.max(axis=0) + array.min(axis=0)) / 2
    array = array / (np.abs(array).max() or 1.0)
    return {node: (float(x), float(y)) for node, (x, y) in zip(nodes, array, strict=True)}


def _bends(edges: list[list[int]]) -> list[float]:
    """0 for an edge alone between its nodes; edges there and back, or given twice, lie apart."""
    both: dict[tuple[int, ...], int] = {}
    for edge in edges:
        pair = tuple(sorted(edge))
        both[pair] = both.get(pair, 0) + 1
    seen: dict[tuple[int, ...], int] = {}
    bends = []
    for source, target in edges:
        same = seen[source, target] = seen.get((source, target), 0) + 1
        is_alone = both[tuple(sorted((source, target)))] == 1
        bends.append(0.0 if is_alone and source != target else 0.16 * same)
    return bends


def _curve(
    start: Point, end: Point, bend: float, radius: float, width: float
) -> tuple[list[Point], list[Point]]:
    """The curve from the rim of a node to that of another, or a loop above it, and the head."""
    first, last = np.array(start), np.array(end)
    long, half = 0.04 + 0.035 * width, 0.016 + 0.03 * width
    if start == end:
        size, rim = radius * (2 + 5 * bend), radius * math.sqrt(0.5)
        points = [first + offset for offset in ((-rim, rim), (-size, rim + size))]
        points += [first + offset for offset in ((size, rim + size), (rim, rim))]
    else:
        along = last - first
        middle = (first + last) / 2 + bend * np.array([along[1], -along[0]])
        points = [
            first + radius * _toward(first, middle),
            middle,
            last + radius * _toward(last, middle),
        ]
    tip, back = points[-1], _toward(points[-1], points[-2])
    points[-1] = base = tip + long * back
    across = half * np.array([back[1], -back[0]])
    return [_point(p) for p in points], [_point(p) for p in (tip, base + across, base - across)]


def _toward(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    return (end - start) / (np.linalg.norm(end - start) or 1.0)


def _point(point: np.ndarray) -> Point:
    return float(point[0]), float(point[1])
