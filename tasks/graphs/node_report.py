"""Report of a test of nodes: accuracy by neighbourhood, and entropy of attention."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import matplotlib
import torch
from lightning import Callback, LightningModule, Trainer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch_geometric.data import Data
from torchmetrics import Metric

from attnkit.core.capture.watch import told_of_attention
from attnkit.core.kernels.record import unrecorded
from attnkit.core.running import undisturbed
from attnkit.interpret.diagnosis import Recorder
from attnkit.interpret.graph_picture import empty_figure
from attnkit.interpret.head_measures import Sampling
from attnkit.interpret.picture import save
from attnkit.lightning.console import say
from attnkit.lightning.files import write_csv
from attnkit.tasks.graphs.data import FullGraph
from attnkit.tasks.graphs.sampling import sub_graphs

_DEGREES = 64  # groups of degrees: 0, 1, 2, 3–4, 5–8, …
_SHARES = 5  # groups of homophily, each a fifth
NONE = "none"
"""The group of nodes without a labelled neighbour."""


class GroupScore(NamedTuple):
    """Accuracy in a group of nodes.

    `by` is "degree" or "homophily"; `group` is a range ("3–4", "0.2–0.4"), or "none" for nodes
    without a labelled neighbour; `largest_class` is the share of the group's largest class, which
    is the accuracy of a model that always predicts it.
    """

    by: str
    group: str
    nodes: int
    right: int
    accuracy: float
    largest_class: float


def in_degrees(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return the number of edges into each node without self-loops, int64 [nodes]."""
    source, target = edge_index
    return torch.bincount(target[source != target], minlength=num_nodes)


def label_homophily(edge_index: Tensor, y: Tensor) -> Tensor:
    """Return the share of each node's neighbours with its label, float [nodes].

    Neighbours are the sources of edges into a node, other than the node itself, that have a label
    (0 or more). A node without any gets NaN. Source: Pei et al., Geom-GCN, 2020; their mean over
    the nodes is PyG's `homophily(…, method="node")`.
    """
    source, target = edge_index
    counts = (source != target) & (y[source] >= 0)
    source, target = source[counts], target[counts]
    alike = torch.bincount(target[y[source] == y[target]], minlength=len(y))
    return alike / torch.bincount(target, minlength=len(y))


class NeighbourhoodScores(Metric):
    """Accuracy of nodes by degree and by homophily, exact over all batches and processes.

    Args:
        num_classes: number of classes.
    """

    full_state_update: bool = False

    labels: Tensor
    right: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        groups = _DEGREES + _SHARES + 1
        self.add_state("labels", torch.zeros(groups, num_classes, dtype=torch.long), "sum")
        self.add_state("right", torch.zeros(groups, dtype=torch.long), "sum")

    def update(self, right: Tensor, labels: Tensor, degrees: Tensor, homophily: Tensor) -> None:
        """Add nodes.

        Args:
            right: whether each is classified right, bool [nodes].
            labels: their classes, integers [nodes].
            degrees: result of `in_degrees`, [nodes].
            homophily: result of `label_homophily`, [nodes].
        """
        by_degree = torch.where(degrees > 1, degrees.double().log2().ceil().long() + 1, degrees)
        share = (homophily * _SHARES + 1e-6).nan_to_num(_SHARES).long()
        share = share.clamp(max=_SHARES - 1).where(~homophily.isnan(), _SHARES)
        for groups in (by_degree, _DEGREES + share):
            self.labels.index_put_((groups, labels), torch.ones_like(labels), accumulate=True)
            self.right.index_add_(0, groups, right.long())

    def compute(self) -> list[GroupScore]:
        """Return a row for each group that has nodes."""
        rows = []
        for (by, group), labels, right in zip(
            _groups(), self.labels.tolist(), self.right.tolist(), strict=True
        ):
            if nodes := sum(labels):
                rows.append(GroupScore(by, group, nodes, right, right / nodes, max(labels) / nodes))
        return rows


def _groups() -> Iterator[tuple[str, str]]:
    """Yield the criterion and the name of each group."""
    for number in range(_DEGREES):
        if number < 3:
            yield "degree", str(number)
        else:
            yield "degree", f"{2 ** (number - 2) + 1}–{2 ** (number - 1)}"
    for number in range(_SHARES):
        yield "homophily", f"{number / _SHARES:g}–{(number + 1) / _SHARES:g}"
    yield "homophily", NONE


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


class NodeReport(Callback):
    """Callback that writes, after a test of nodes, where the model errs and how it attends.

    - `accuracy_by_neighbourhood.csv` and `.png`: accuracy of the test nodes by the number of their
      neighbours and by the share of these with the node's label, in the whole graph even if
      batches are sampled (for the columns see `GroupScore`); only for classes
    - `attention_entropy.csv` and `.png`: a row for each head of each layer: `entropy`, over that of
      uniform attention (1: uniform, 0: all on one neighbour), `uniform`, the distance from 1/degree
      (see `attnkit.Diagnosis`), and the entropy by the number of edges. The rows describe the first
      batch: the whole graph, or the first sampled sub-graph with the neighbours that were drawn.
      Global attention is measured for 128 random nodes. A model without attention has no such file.

    It costs one forward of the first batch. Only the first process writes.

    Args:
        folder: created if it does not exist.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self._scores: NeighbourhoodScores | None = None
        self._rows: list[dict[str, Any]] = []
        self._around: tuple[Tensor, Tensor] | None = None

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        num_classes = getattr(pl_module, "num_classes", None)
        self._scores = (
            NeighbourhoodScores(num_classes).to(pl_module.device) if num_classes else None
        )
        self._rows, self._around = [], None

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(batch, Data) or dataloader_idx:
            return
        if self._scores is not None and isinstance(outputs, Mapping):
            self._count(trainer, self._scores, outputs, batch)
        if batch_idx == 0 and trainer.is_global_zero:
            with trainer.precision_plugin.forward_context(), unrecorded():
                self._rows = entropies(cast(Any, pl_module), next(sub_graphs(batch)))

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found: list[GroupScore] = []
        if self._scores is not None and self._scores.update_called:
            found = self._scores.compute()  # sums over the processes
        if not trainer.is_global_zero:
            return
        if found:
            table = self.folder / "accuracy_by_neighbourhood.csv"
            rows = ([*score[:4], *(f"{share:.6f}" for share in score[4:])] for score in found)
            write_csv(table, GroupScore._fields, rows)
            save(table.with_suffix(".png"), draw_groups(found))
        if self._rows:
            table = self.folder / "attention_entropy.csv"
            degrees = degrees_of(self._rows)
            header = ["layer", "head", "entropy", "uniform", *(f"entropy at {d}" for d in degrees)]
            write_csv(table, header, (_cells(row, degrees) for row in self._rows))
            save(table.with_suffix(".png"), draw_entropies(self._rows))

    def _count(
        self, trainer: Trainer, scores: NeighbourhoodScores, outputs: Mapping, batch: Data
    ) -> None:
        if not outputs.keys() >= {"node", "label", "predicted"}:
            return
        graph, own = batch, True
        if "batch_size" in batch:
            graph, own = getattr(trainer, "datamodule", None), False
            graph = getattr(graph, "graph", None)
            if not isinstance(graph, Data):
                return
        if own or self._around is None:
            y, edge_index = graph.y, graph.edge_index
            self._around = in_degrees(edge_index, len(y)), label_homophily(edge_index, y)
        nodes, labels, predicted = (outputs[name] for name in ("node", "label", "predicted"))
        # every process has the whole graph, which counts once
        if isinstance(trainer.test_dataloaders, FullGraph) and not trainer.is_global_zero:
            nodes, labels, predicted = nodes[:0], labels[:0], predicted[:0]
        around = (values[nodes.to(values.device)].to(labels.device) for values in self._around)
        scores.update(predicted == labels, labels, *around)


def entropies(module: nn.Module, batch: Data) -> list[dict[str, Any]]:
    """Return a row of `attnkit.diagnose_attention` for each head, without its costly measures.

    There are no rows if the model has no attention that can be recorded.
    """
    model = cast(nn.Module, module.model)
    recorder = Recorder(Sampling(compared=0, pairs=0))
    try:
        with undisturbed(module), told_of_attention(model, recorder.hear):
            cast(Any, module).logits(batch)
    except ValueError as error:
        if not str(error).startswith("model: "):
            raise
        say("attention: the model has none that can be recorded, so no attention_entropy.csv")
        return []
    return recorder.rows


def _cells(row: Mapping[str, Any], degrees: list[str]) -> list[Any]:
    by_degree = row.get("entropy_by_degree") or {}
    known = (by_degree.get(degree) for degree in degrees)
    values = (row["entropy"], row["uniform"], *known)
    cells = [None if value is None else f"{value:.6f}" for value in values]
    return [layer_of(row), row["head"], *cells]
