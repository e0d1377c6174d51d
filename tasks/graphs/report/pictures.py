"""The pictures of a test of node classification."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnkit.interpret.graph_picture import empty_figure
from attnkit.tasks.graphs.report.neighbourhoods import GroupScore

_TITLES = {
    "degree": "neighbours of the node",
    "homophily": "share of its neighbours with its label",
}
BLUE, RED = "#1f77b4", "#b3300a"
_MOST_NAMES = 24


def draw_groups(scores: Sequence[GroupScore]) -> Figure:
    """Draw accuracy by degree and by homophily.

    Bars have 95 % intervals (Wilson) and the number of nodes above them; lines show the share of
    each group's largest class.
    """
    parts = {by: [score for score in scores if score.by == by] for by in _TITLES}
    widths = [max(4, len(part)) for part in parts.values()]
    figure = empty_figure(0.72 * sum(widths) + 1.6, 3.6)
    panels = figure.subplots(1, 2, width_ratios=widths, sharey=True)
    for panel, (by, part) in zip(panels, parts.items(), strict=True):
        places = range(len(part))
        ends = [_interval(score) for score in part]
        errors = [
            [score.accuracy - low for score, (low, _) in zip(part, ends, strict=True)],
            [high - score.accuracy for score, (_, high) in zip(part, ends, strict=True)],
        ]
        panel.bar(places, [score.accuracy for score in part], color=BLUE, alpha=0.75, width=0.7)
        panel.errorbar(
            places, [score.accuracy for score in part], errors, fmt="none", ecolor="0.2", lw=1,
            capsize=2,
        )  # fmt: skip
        panel.hlines(
            [score.largest_class for score in part],
            [place - 0.35 for place in places],
            [place + 0.35 for place in places],
            color=RED,
            lw=1.5,
            label="always the group's largest class",
        )
        for place, score in zip(places, part, strict=True):
            panel.text(place, 1.03, f"{score.nodes:,}", ha="center", va="bottom", fontsize=7)
        panel.set_xticks(places, [score.group for score in part], fontsize=8)
        panel.set_xlabel(_TITLES[by], fontsize=9)
        plain(panel)
        panel.grid(axis="x", visible=False)
    panels[0].set_ylim(0, 1.12)
    panels[0].set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    panels[0].set_ylabel("test accuracy", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", frameon=False, fontsize=8)
    figure.suptitle("accuracy by neighbourhood, with the number of nodes", fontsize=10)
    return figure


def draw_entropies(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the normalised entropy of each head by layer, and of each layer by degree.

    1 is uniform attention.

    Args:
        rows: result of `attnkit.diagnose_attention`: a mapping for each head, layer by layer.
    """
    layers = list(dict.fromkeys(layer_of(row) for row in rows))
    colours = matplotlib.colormaps["viridis"]
    colour_of = {
        layer: colours(0.85 * place / max(1, len(layers) - 1)) for place, layer in enumerate(layers)
    }
    degrees = degrees_of(rows)
    width = min(max(3.4, 1.2 + 0.5 * len(layers)), 14)
    figure = empty_figure(width + 4.2 * bool(degrees), 3.6)
    panels = figure.subplots(1, 1 + bool(degrees), sharey=True, squeeze=False)[0]
    if degrees:
        panels[0].get_gridspec().set_width_ratios([width, 4.2])
    for place, layer in enumerate(layers):
        heads = [row for row in rows if layer_of(row) == layer and row["entropy"] is not None]
        aside = [0.6 * ((head + 0.5) / len(heads) - 0.5) for head in range(len(heads))]
        panels[0].plot(
            [place + x for x in aside], [row["entropy"] for row in heads], color=colour_of[layer],
            ls="", marker="o", ms=4,
        )  # fmt: skip
        means = [_mean(row["entropy_by_degree"].get(d) for row in heads
                       if row.get("entropy_by_degree")) for d in degrees]  # fmt: skip
        known = [(number, mean) for number, mean in enumerate(means) if mean is not None]
        if known:
            label = layer if len(layers) <= 8 else None
            panels[1].plot(*zip(*known, strict=True), color=colour_of[layer], marker="o", ms=3,
                           lw=1.5, label=label)  # fmt: skip
    names = layers if len(layers) <= _MOST_NAMES else [str(place) for place in range(len(layers))]
    panels[0].set_xticks(range(len(layers)), names, rotation=30, ha="right", fontsize=8)
    panels[0].set_xlim(-0.6, len(layers) - 0.4)
    panels[0].set_ylabel("entropy / entropy of uniform attention", fontsize=9)
    panels[0].set_title("each head, side by side", fontsize=10)
    for panel in panels:
        panel.axhline(1, color="0.4", lw=0.8, ls="--", label="uniform attention")
        plain(panel)
    panels[0].set_ylim(0, 1.05)
    if degrees:
        panels[1].set_xticks(range(len(degrees)), degrees, fontsize=8)
        panels[1].set_xlabel("edges into the node", fontsize=9)
        panels[1].set_title("mean over the heads", fontsize=10)
    panels[-1].legend(frameon=False, fontsize=7, loc="lower left")
    figure.suptitle("how evenly attention is spread", fontsize=10)
    return figure


def layer_of(row: Mapping[str, Any]) -> str:
    """Return the name of a layer in tables and pictures, with a number from its second call on."""
    name = row["layer"] or "(model)"
    return f"{name} #{row['call'] + 1}" if row["call"] else name


def degrees_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the groups of degrees that occur in any row, ascending."""
    found = {degree for row in rows for degree in row.get("entropy_by_degree") or ()}
    return sorted(found, key=lambda degree: int(degree.partition("–")[0]))


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _interval(score: GroupScore, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % interval of the accuracy (Wilson, 1927)."""
    n, p = score.nodes, score.accuracy
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return min(p, middle - half), max(p, middle + half)


def plain(panel: Axes) -> None:
    panel.tick_params(labelsize=8)
    panel.grid(alpha=0.25)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
