"""A picture of a graph's explanation: the node, its edges, the scale, and fidelity beside it."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, PathPatch, Polygon
from matplotlib.path import Path

from attnkit.interpret.graphs.ego import (
    FOR,
    NO_CLASS,
    OTHER,
    DrawnEdge,
    EgoGraph,
    class_colours,
    left_out,
    legend,
    width_samples,
)
from attnkit.interpret.graphs.fidelity import EdgeFidelity
from attnkit.lightning.telling.text import in_picture

_INK, _SOFT = "#1d1f24", "#5b6068"
_THIN, _WIDE = 0.8, 7.0  # points


def draw_graph(
    ego: EgoGraph,
    index: int | None,
    classes: Sequence[int],
    names: Sequence[str],
    *,
    title: str,
    method: str,
    classes_are: str,
    fidelity: EdgeFidelity | None,
) -> Figure:
    """The ego graph with its legend; on its right what is left of p without edges and with edges.

    Args:
        index: the node, which a ring marks.
        classes: of each node of the graph, −1 where it is not known; empty: colours say nothing.
        names: of the classes; empty: their numbers.
        method: of the edges' numbers, in the legend.
        classes_are: what the colours are of, in the legend.
        fidelity: None: no curves.
    """
    figure = Figure(figsize=(10.5 if fidelity else 7.5, 6.4), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    if fidelity is None:
        panels = {"graph": figure.subplots()}
    else:
        panels = figure.subplot_mosaic(
            [["graph", "plus"], ["graph", "minus"]], width_ratios=[2.2, 1]
        )
        _curves(panels["plus"], panels["minus"], fidelity)
        sentence = textwrap.fill(str(fidelity), 150)
        figure.supxlabel(in_picture(sentence), x=0.01, ha="left", fontsize=9)
    figure.suptitle(in_picture(title), x=0.01, ha="left", fontsize=11)
    graph = panels["graph"]
    graph.set(aspect="equal", xlim=(-1.14, 1.14), ylim=(-1.14, 1.14))
    graph.axis("off")
    for edge in ego.edges:
        _edge(graph, edge)
    drawn = [classes[node.number] for node in ego.nodes] if len(classes) else []
    colours = class_colours(drawn)
    letters = max(len(str(node.number)) for node in ego.nodes)
    for node in ego.nodes:
        one = classes[node.number] if len(classes) else -1
        is_asked = node.number == index
        if is_asked:
            ring = Circle((node.x, node.y), 1.35 * ego.radius, fill=False, ec=_INK, lw=1.6)
            graph.add_patch(ring).set_zorder(3)
        fill = colours.get(one, NO_CLASS)
        graph.add_patch(
            Circle((node.x, node.y), ego.radius, fc=fill, ec=_INK, lw=1.6 if is_asked else 0.7)
        ).set_zorder(3)
        graph.text(
            node.x, node.y, str(node.number), ha="center", va="center_baseline", color=_INK,
            fontsize=min(9.0, 290 * ego.radius / (0.62 * letters + 0.4)), zorder=4,
            weight="bold" if is_asked else "normal",
        )  # fmt: skip
    _legends(graph, ego, legend(colours, drawn, names), method, classes_are)
    graph.text(0, 1, left_out(ego), transform=graph.transAxes, fontsize=8, color=_SOFT, va="bottom")
    return figure


def _edge(panel: Axes, edge: DrawnEdge) -> None:
    bezier = Path.CURVE3 if len(edge.curve) == 3 else Path.CURVE4
    path = Path(edge.curve, [Path.MOVETO, *[bezier] * (len(edge.curve) - 1)])
    order = 1 + edge.width
    style = {"lw": _points(edge.width), "capstyle": "butt", "zorder": order}
    panel.add_patch(PathPatch(path, fill=False, ec=edge.colour, **style))
    panel.add_patch(Polygon(edge.head, fc=edge.colour, ec="none", zorder=order))


def _points(width: float) -> float:
    return _THIN + (_WIDE - _THIN) * width


def _legends(
    panel: Axes, ego: EgoGraph, shown: list[tuple[str, str]], method: str, classes_are: str
) -> None:
    """The widths of edges and the colours of classes, below the graph."""
    lines = [
        Line2D([], [], color=colour, lw=_points(width), label=label)
        for colour, width, label in width_samples(ego)
    ]
    style: dict[str, Any] = {"fontsize": 8, "title_fontsize": 8, "frameon": False}
    style |= {"alignment": "left", "loc": "upper left", "borderaxespad": 0}
    widths = panel.legend(
        handles=lines, title=method, bbox_to_anchor=(0, 0), ncols=len(lines), **style
    )
    if shown:
        panel.add_artist(widths)
        look: dict[str, Any] = {"ls": "", "marker": "o", "ms": 8, "mec": _INK, "mew": 0.7}
        dots = [Line2D([], [], mfc=colour, label=name, **look) for name, colour in shown]
        panel.legend(handles=dots, title=classes_are, bbox_to_anchor=(0, -0.085), ncols=6, **style)


def _curves(plus: Axes, minus: Axes, fidelity: EdgeFidelity) -> None:
    """p without the first k edges, and with these alone."""
    ks = [int(row["k"]) for row in fidelity.rows]
    for panel, name, title in (
        (plus, "plus", "without the first k edges (fidelity₊)"),
        (minus, "minus", "with these alone (fidelity₋)"),
    ):
        p = fidelity.probability

        def left(key: str, whole: float = p) -> np.ndarray:
            return whole - np.array([row[key] for row in fidelity.rows])

        panel.fill_between(
            ks, left(f"random_{name}_low"), left(f"random_{name}_high"), color=OTHER, alpha=0.45,
            lw=0, label=f"{fidelity.num_draws} random orders",
        )  # fmt: skip
        panel.plot(ks, left(f"random_{name}"), color=_SOFT, lw=1.2, label="mean of these")
        panel.plot(ks, left(name), color=FOR, lw=2, marker="o", ms=4, label="edges as ranked")
        panel.axhline(p, color=_INK, lw=0.8, ls=(0, (4, 3)), label="all edges")
        panel.set_title(title, fontsize=9, loc="left")
        panel.set_ylabel(f"{fidelity.quantity.symbol}({fidelity.target})", fontsize=8)
        panel.set(ylim=(-0.03, 1.03), xscale="log" if ks[-1] > 2 else "linear")
        panel.set_xticks(ks, [str(k) for k in ks])
        panel.minorticks_off()
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    minus.set_xlabel("k, edges", fontsize=8)
    minus.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(-0.02, -0.2), ncols=2)
