"""The scores of maps over the epochs, as one picture."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

History = dict[str, list[tuple[float, float]]]
"""For each score, (epoch, value) in order."""

_GAPS = {
    "interpret_gap": ("this map", "#b3300a", "-"),
    "interpret_gap_centre": ("centre", "#1f5fbf", "--"),
    "interpret_gap_input_gradient": ("input gradient", "#2a7f3f", ":"),
}
_SHARES = {
    "interpret_class_sensitivity": "class sensitivity\n(0: not of the class)",
    "interpret_prefix_share": "share of class and register tokens",
    "interpret_words": "share of words better than random",
}


def draw_history(history: History) -> Figure:
    """The gap beside random, centre and input gradient; and a panel for each other score."""
    others = [name for name in _SHARES if history.get(name)]
    columns = 1 + len(others)
    figure = Figure(figsize=(4.4 * columns, 3.4), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    panels = figure.subplots(1, columns, squeeze=False)[0]
    first = panels[0]
    if history.get("interpret_random"):
        epochs, within = zip(*history["interpret_random"], strict=True)
        low = [-value for value in within]
        first.fill_between(epochs, low, within, color="0.85", label="random maps, ± 2 s.e.")
    first.axhline(0, color="0.4", lw=0.8)
    for name, (label, colour, style) in _GAPS.items():
        if history.get(name):
            first.plot(
                *zip(*history[name], strict=True), color=colour, ls=style, marker="o", ms=3,
                label=label,
            )  # fmt: skip
    first.set_title("gap in p: what is lost where the map points", fontsize=10)
    first.legend(frameon=False, fontsize=8)
    for panel, name in zip(panels[1:], others, strict=True):
        panel.plot(*zip(*history[name], strict=True), color="#b3300a", marker="o", ms=3)
        panel.set_title(_SHARES[name], fontsize=10)
        panel.set_ylim(0, 1.1 * max(value for _, value in history[name]) or 1)
    last = max(epoch for points in history.values() for epoch, _ in points)
    for panel in panels:
        panel.set_xlabel("epoch", fontsize=9)
        panel.set_xlim(0.5, last + 0.5)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        panel.tick_params(labelsize=8)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return figure
