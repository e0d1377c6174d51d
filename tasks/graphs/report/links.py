"""Callback for tests of link prediction: the best and the worst pairs, and a picture."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.functional.classification import binary_precision_recall_curve

from attnkit.core.arguments import at_least
from attnkit.interpret.graph_picture import empty_figure
from attnkit.interpret.picture import save
from attnkit.lightning.files import write_csv
from attnkit.tasks.graphs.report.attended import gathered
from attnkit.tasks.graphs.report.pictures import BLUE, RED, plain

_POINTS = 1000  # points of the drawn curve; more would not be visible


class LinkReport(Callback):
    """Callback that writes, after a test of a `LinkPrediction`, the scores of pairs.

    - `scored_pairs.csv`: the most and the least probable of the tested edges and of the absent
      pairs: `source`, `target`, then `source_name` and `target_name` if the data module has
      `node_names`, `is_edge` (1 or 0) and `probability`. A pair of an undirected graph occurs once.
    - `link_scores.png`: the probabilities of edges and absent pairs, and precision over recall.

    Only the first process writes.

    Args:
        folder: created if it does not exist.
        num_pairs: number of the most and of the least probable pairs of each kind.

    Raises:
        ValueError: `num_pairs` below 1.
    """

    def __init__(self, folder: str | Path, *, num_pairs: int = 20) -> None:
        at_least(1, num_pairs=num_pairs)
        self.folder = Path(folder).expanduser().absolute()
        self.num_pairs = num_pairs
        self._tested: list[tuple[Tensor, ...]] = []

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tested = []

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        names = ("pairs", "probability", "is_edge")
        self._tested.append(tuple(outputs[name].cpu() for name in names))

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        tested = gathered(trainer, self._tested)
        if not trainer.is_global_zero or not tested:
            return
        pairs, probability, is_edge = (torch.cat(part, -1) for part in zip(*tested, strict=True))
        save(self.folder / "link_scores.png", draw_scores(probability, is_edge))
        names = getattr(getattr(trainer, "datamodule", None), "node_names", None)
        pairs = pairs if getattr(pl_module, "directed", True) else pairs.sort(dim=0).values
        header = ["source", "target", *["source_name", "target_name"] * bool(names)]
        rows = (
            [*pair, *([names[node] for node in pair] if names else ()), kind, f"{p:.6f}"]
            for pair, kind, p in extremes(pairs, probability, is_edge, self.num_pairs)
        )
        write_csv(self.folder / "scored_pairs.csv", [*header, "is_edge", "probability"], rows)


def extremes(
    pairs: Tensor, probability: Tensor, is_edge: Tensor, count: int
) -> Iterator[tuple[list[int], int, float]]:
    """Yield the `count` most and least probable edges, then other pairs; each pair once.

    An item is a pair, 1 for an edge or 0, and the probability.
    """
    for kind in (1, 0):
        numbers = (is_edge == kind).nonzero().flatten().numpy()
        first = np.unique(pairs[:, numbers].numpy(), axis=1, return_index=True)[1]
        order = numbers[first[probability[numbers[first]].argsort(descending=True, stable=True)]]
        for place in [*order[:count], *order[max(count, len(order) - count) :]]:
            yield pairs[:, place].tolist(), kind, float(probability[place])


def draw_scores(probability: Tensor, is_edge: Tensor) -> Figure:
    """Draw the probabilities of edges and other pairs, and precision over recall.

    Args:
        probability, is_edge: one value for each pair, [pairs].
    """
    figure = empty_figure(8, 3.4)
    left, right = figure.subplots(1, 2)
    bins = np.linspace(0, 1, 41)
    for kind, colour, name in ((1, BLUE, "edges"), (0, RED, "pairs without an edge")):
        values = probability[is_edge == kind].float().numpy()
        shares = np.full(len(values), 1 / max(1, len(values)))
        label = f"{len(values):,} {name}"
        left.hist(values, bins, weights=shares, color=colour, alpha=0.55, label=label)
    left.set_xlabel("probability of an edge", fontsize=9)
    left.set_ylabel("share of the pairs", fontsize=9)
    left.legend(frameon=False, fontsize=8)
    precision, recall, _ = binary_precision_recall_curve(probability.float(), is_edge.long())
    places = torch.linspace(0, len(recall) - 1, min(_POINTS, len(recall))).round().long()
    right.plot(recall[places], precision[places], color=BLUE, drawstyle="steps-pre")
    right.axhline(float(is_edge.float().mean()), color="0.5", lw=1, ls="--")
    right.set(xlim=(0, 1.01), ylim=(0, 1.03))
    right.set_xlabel("recall: share of the edges that are found", fontsize=9)
    right.set_ylabel("precision: share of the found that are edges", fontsize=9)
    right.set_title("dashed: by chance", fontsize=8)
    for panel in (left, right):
        plain(panel)
    return figure
