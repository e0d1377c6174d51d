"""The pictures of masks, edges and the doctor in the README, and of gates in the benchmarks.

    python docs/doors.py docs

This writes mask_cost.png, edge_cost.png and attention_cost.png, from the tables of
docs/benchmarks.md, and doctor.png, from a doctor that runs here: about a minute.
"""

import re
import sys
from pathlib import Path

import matplotlib

import attnkit
from attnkit.checks.report import WHAT

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PAGE = Path(__file__).with_name("benchmarks.md")
OURS, THEIRS = "#4d9e5b", "#8a8f98"
VERDICTS = {"right": OURS, "fail": "#c8372d", "note": "#b97a1e", "not asked": "#8a8f9840"}


def rows_under(heading, header):
    """The rows of a table of the benchmarks, each a list of cells."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1]
    lines = section[section.index(header) :].splitlines()[2:]
    end = next(number for number, line in enumerate(lines) if not line.startswith("|"))
    return [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in lines[:end]]


def numbers(cell):
    return [float(found.replace(",", "")) for found in re.findall(r"\d[\d,.]*\d|\d", cell)]


def draw_masks(path):
    rows = rows_under("Masks", "| mask | blocks, 4,096 tokens")
    names = [row[0].replace("`", "").replace("\\", "") for row in rows]
    allowed, times = ([100 * float(row[column]) for row in rows] for column in (1, 2))
    figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
    places = range(len(rows))
    axis.barh(
        [place - 0.2 for place in places],
        allowed,
        0.38,
        color=THEIRS,
        label="blocks that the mask touches",
    )
    axis.barh(
        [place + 0.2 for place in places],
        times,
        0.38,
        color=OURS,
        label="time of forward and backward",
    )
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.set_xlabel("% of full attention over 4,096 tokens, on a CPU")
    axis.grid(axis="x")
    axis.legend(loc="center right")
    figure.savefig(path)


def draw_edges(path):
    table = rows_under("Attention over edges", "| times as fast as PyG")
    rows = {(row[0], row[1]): row[2:] for row in table}
    layers = ["TransformerConv", "GATv2Conv", "GATConv"]
    kinds = {
        "times as fast": (OURS, rows["as called", "Xeon"]),
        "times less peak memory": (THEIRS, rows["PyG's peak memory / attnkit's", "Xeon"]),
    }
    figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
    for shift, (name, (colour, cells)) in zip((-0.2, 0.2), kinds.items(), strict=True):
        values = [numbers(cell)[0] for cell in cells]
        places = [place + shift for place in range(len(layers))]
        bars = axis.barh(places, values, 0.38, color=colour, label=name)
        axis.bar_label(bars, [f"{value:g} ×" for value in values], padding=3, fontsize=9)
    axis.set_yticks(range(len(layers)), layers)
    axis.invert_yaxis()
    axis.set_xlabel("PyG / attnkit, forward + backward, a million edges, two threads of a CPU")
    axis.margins(x=0.1)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figure.savefig(path)


def draw_attention(path):
    """Accuracy with its spread over seeds against the time of a step, for each attention."""
    table = rows_under("Attention in a convolutional network", "| attention | test accuracy")
    figure, axis = plt.subplots(figsize=(9, 3.5), layout="constrained")
    for name, accuracy, step in table:
        mean, spread = numbers(accuracy)
        colour = THEIRS if name == "none" else OURS
        axis.errorbar(float(step), mean, spread, fmt="o", color=colour, capsize=3)
        top = float(step), mean + spread
        axis.annotate(name, top, xytext=(0, 5), textcoords="offset points", ha="center")
    axis.set_xlabel("time of a training step / that without attention")
    axis.set_ylabel("test accuracy, %")
    axis.margins(x=0.08, y=0.1)
    axis.grid(axis="y")
    figure.savefig(path)


def draw_doctor(path):
    """The table of float32: a cell for each question, coloured by the answer."""
    report = attnkit.doctor(quick=True, record=False)
    print(report)
    verdicts = {(fault.attention, fault.what): fault.verdict for fault in report.faults}
    rows = [row for row in report.rows if row.dtype == "float32"]
    columns = [what for what in WHAT[:8] if any(what in row.cells for row in rows)]
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    for y, row in enumerate(rows):
        whole = f"{row.attention}, {row.dtype} on {row.device}"
        for x, what in enumerate(columns):
            said = row.cells.get(what, "–")
            verdict = "not asked" if said == "–" else verdicts.get((whole, what), "right")
            colour = VERDICTS[verdict]
            axis.add_patch(plt.Rectangle((x + 0.03, y + 0.06), 0.94, 0.88, color=colour, lw=0))
            ink = "white" if verdict != "not asked" else None
            axis.text(x + 0.5, y + 0.5, said, ha="center", va="center", fontsize=9, color=ink)
    axis.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    axis.set_xticks([x + 0.5 for x in range(len(columns))], columns)
    axis.set_yticks([y + 0.5 for y in range(len(rows))], [row.attention for row in rows])
    axis.tick_params(length=0, labeltop=True, labelbottom=False)
    axis.spines[:].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in VERDICTS.values()]
    names = ["right", "wrong", "a note", "not asked, or not possible"]
    figure.legend(handles, names, loc="outside lower center", ncols=4)
    figure.savefig(path)


def main(folder):
    matplotlib.style.use(Path(__file__).with_name("pictures.mplstyle"))
    draw_masks(Path(folder, "mask_cost.png"))
    draw_edges(Path(folder, "edge_cost.png"))
    draw_attention(Path(folder, "attention_cost.png"))
    draw_doctor(Path(folder, "doctor.png"))


if __name__ == "__main__":
    main(*sys.argv[1:])
