"""Link prediction: the LightningModule, and its report of a test."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch_geometric.data import Data
from torchmetrics import MeanMetric, Metric
from torchmetrics.functional.classification import binary_precision_recall_curve

from attnkit.core.arguments import at_least
from attnkit.interpret.graph_picture import empty_figure
from attnkit.interpret.picture import save
from attnkit.lightning import UserError
from attnkit.lightning.files import write_csv
from attnkit.lightning.modules.values import ValuesModule
from attnkit.lightning.protocols import Explained
from attnkit.tasks.graphs.module import beside, check_channels, check_edges, check_readout
from attnkit.tasks.graphs.negative_pairs import present_from
from attnkit.tasks.graphs.node_attention import gathered
from attnkit.tasks.graphs.node_report import BLUE, RED, plain

PAIRS = 2**18  # pairs scored at a time


class LinkPrediction(ValuesModule):
    """Predicts whether an edge joins two nodes: binary cross-entropy over edges and absent pairs.

    A batch is one of a `GraphDataModule` with `links` (see `Links`). The logit of a pair is the
    inner product of the model's outputs for its nodes, z_i · z_j + bias (Kipf and Welling,
    Variational Graph Auto-Encoders, 2016, without the bias), which does not depend on their order.
    In a directed graph, the first half of the source's channels is multiplied by the second half of
    the target's. A model with `readout="edge"` returns the logit itself; in an undirected graph the
    mean over both orders is taken.

    Validation and test log `loss`, `accuracy`, `auroc` and `average_precision` of the edges and as
    many absent pairs, or those of the data. They also log metrics of the rank of each edge among
    `num_ranked` pairs with the same source, or among those of the data: `mrr`, the mean of
    1 / rank, and `hits1`, …, the share of edges with at most that rank. Pairs with equal logits
    rank before the edge, as in Hits@K of OGB's evaluator (Hu et al., 2020); its MRR ranks half of
    them so.

    Args:
        model: (x [nodes, in_channels], edge_index [2, edges]) to [nodes, channels]; may take
            `edge_attr` and `edge_weight`; or one with `readout="edge"`, which also takes `pairs`
            [2, pairs] and returns [pairs, 1]; a module, or its configuration (see `TaskModule`).
        optimizer, scheduler, finetune: see `TaskModule`.
        directed: whether edges from i to j and from j to i are different.
        hits_at: the ranks k of the metrics `hits<k>`.
        in_channels: number of features of a node; if given, data with another number is refused.
    """

    level = "link"

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        optimizer: Callable[..., Optimizer] | Mapping[str, Any] | None = None,
        scheduler: Callable[..., LRScheduler] | Mapping[str, Any] | None = None,
        finetune: Callable[[nn.Module], Any] | Mapping[str, Any] | None = None,
        *,
        directed: bool = False,
        hits_at: Sequence[int] = (1, 3, 10),
        in_channels: int | None = None,
    ) -> None:
        super().__init__(model, optimizer, scheduler, finetune, target="labels", num_outputs=1)
        if not isinstance(hits_at, Sequence) or not all(isinstance(k, int) for k in hits_at):
            raise ValueError(f"hits_at: expected a list of ranks such as [1, 3], got {hits_at}")
        for number in hits_at:
            at_least(1, hits_at=number)
        for name in ("target", "num_outputs", "class_names"):
            del self.hparams[name]  # hparams rebuild this class, which has no such arguments
        self.directed = directed
        self.in_channels = in_channels
        self.bias = nn.Parameter(torch.zeros(()))
        for metrics in (self.val_metrics, self.test_metrics):
            metrics.update({"mrr": MeanOfRanks(), **{f"hits{k}": MeanOfRanks(k) for k in hits_at}})

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = getattr(self.trainer, "datamodule", None)
        check_channels(self, data)
        check_readout(self.model, "node", "edge")
        if read := getattr(self.model, "position_dim", None):
            raise UserError(
                f"model.position_dim: links have no positions: expected null, got {read}"
            )
        if (graph := getattr(data, "graph", None)) is not None:
            check_edges(self.model, graph)

    def scores_of(self, batch: Data) -> Callable[[Tensor], Tensor]:
        """Return a function from pairs of nodes [2, …] to their logits […] in the graph of a batch.

        Raises:
            UserError: the model does not return a row for each node, or pair.
        """
        given = beside(self.model, batch)
        if getattr(self.model, "readout", None) == "edge":

            def of_pairs(pairs: Tensor) -> Tensor:
                flat = pairs.flatten(1)
                both = [flat] if self.directed else [flat, flat.flip(0)]
                ordered = torch.cat(both, dim=1)
                found = self(batch.x, batch.edge_index, pairs=ordered, **given)
                self._check(found, [ordered.shape[1], 1], "one logit for each pair")
                return found.view(len(both), -1).mean(dim=0).view(pairs.shape[1:]) + self.bias

            return of_pairs
        nodes = self(batch.x, batch.edge_index, **given)
        width = nodes.shape[-1] if isinstance(nodes, Tensor) and nodes.ndim == 2 else 1
        self._check(nodes, [len(batch.x), width], "a row for each node")
        sources, targets = (nodes, nodes)
        if self.directed:
            self._check(nodes, [len(nodes), nodes.shape[1] // 2 * 2], "an even number of channels")
            sources, targets = nodes.chunk(2, dim=1)

        def of_nodes(pairs: Tensor) -> Tensor:
            flat = pairs.flatten(1)
            parts = [
                (sources[part[0]] * targets[part[1]]).sum(dim=1)
                for part in flat.split(PAIRS, dim=1)
            ]
            return torch.cat(parts).view(pairs.shape[1:]) + self.bias

        return of_nodes

    def _check(self, found: Any, shape: list[int], what: str) -> None:
        if not isinstance(found, Tensor):
            raise UserError(f"model: expected {what}, got {type(found).__name__}")
        if list(found.shape) != shape:
            raise UserError(f"model: expected {what}, {shape}, got {list(found.shape)}")

    def explained(self, batch: Data) -> Explained:
        """Return the inputs of `attnkit.explain`: a model of a pair's logit, features and edges."""
        inputs = {"x": batch.x, "edge_index": batch.edge_index, **beside(self.model, batch)}
        return Explained(LogitOfPairs(self), inputs, class_names=["edge"], of_pairs=True)

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        scores = self.scores_of(batch)(torch.cat([batch.pairs, batch.negatives], dim=1))
        losses = self.losses(*_labelled(scores, batch.pairs.shape[1]))
        self.log_train_loss(losses)
        return losses.mean()

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self._rank("val", batch)

    def test_step(self, batch: Data, batch_idx: int) -> dict[str, Tensor]:
        """Return `pairs` [2, pairs], their `probability`, and `is_edge`, 1 or 0."""
        outputs, truth = self._rank("test", batch)
        pairs = torch.cat([batch.pairs, batch.negatives], dim=1)
        return {"pairs": pairs, "probability": outputs[:, 0].sigmoid(), "is_edge": truth[:, 0]}

    def _rank(self, stage: str, batch: Data) -> tuple[Tensor, Tensor]:
        """Update the metrics of a stage; return outputs and truth of edges and absent pairs."""
        parts = [batch.pairs, batch.negatives, batch.ranked.flatten(1)]
        scores = self.scores_of(batch)(torch.cat(parts, dim=1)).float()
        edges, negatives, others = scores.split([part.shape[1] for part in parts])
        outputs, truth = _labelled(torch.cat([edges, negatives]), len(edges))
        ranks = ranks_of(edges, others.view(batch.ranked.shape[1:]))
        for name, module in (self.val_metrics if stage == "val" else self.test_metrics).items():
            metric = cast(Metric, module)
            if name == "loss":
                metric.update(self.losses(outputs, truth))
            elif isinstance(metric, MeanOfRanks):
                metric.update(ranks)
            else:
                metric.update(outputs, truth)
            self._log(f"{stage}/{name}", metric, prog_bar=name == "mrr")
        return outputs, truth

    def metrics(self) -> dict[str, Metric]:
        known = super().metrics()
        return {name: known[name] for name in ("accuracy", "auroc", "average_precision")}

    def predict_step(self, batch: Data, batch_idx: int) -> dict[str, list[Any]]:
        """Return the `top_k` absent pairs of each node with the largest probability, as columns.

        The numbers of nodes are followed by their names if the data module has `node_names`. All
        pairs of nodes are scored, in blocks.
        """
        score, nodes = self.scores_of(batch), torch.arange(len(batch.x), device=batch.x.device)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for sources in batch.sources.split(max(1, PAIRS // len(nodes))):
            every = torch.stack(torch.meshgrid(sources, nodes, indexing="ij"))
            scores = score(every).float()
            scores[present_from(batch.present, sources, len(nodes))] = -torch.inf
            best, targets = scores.topk(min(batch.top_k, len(nodes)), dim=1)
            is_absent = best > -torch.inf
            from_each = sources[:, None].expand_as(targets)
            found.append((from_each[is_absent], targets[is_absent], best[is_absent].sigmoid()))
        source, target, probability = (
            torch.cat(part).tolist() for part in zip(*found, strict=True)
        )
        names = getattr(getattr(self.trainer, "datamodule", None), "node_names", None)
        columns = {"source": source, "target": target}
        named = (
            {f"{key}_name": [names[n] for n in nodes] for key, nodes in columns.items()}
            if names
            else {}
        )
        return {**columns, **named, "probability": probability}


class LogitOfPairs(nn.Module):
    """The logits [pairs, 1] of a `LinkPrediction` as a function of tensors."""

    def __init__(self, module: LinkPrediction) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, edge_index: Tensor, pairs: Tensor, **carried: Tensor) -> Tensor:
        batch = Data(x=x, edge_index=edge_index, **carried)
        return self.module.scores_of(batch)(pairs)[:, None]


def _labelled(scores: Tensor, num_edges: int) -> tuple[Tensor, Tensor]:
    """Return scores of edges, then of absent pairs, as outputs [pairs, 1], and their truth."""
    truth = torch.zeros_like(scores, dtype=torch.float32)
    truth[:num_edges] = 1
    return scores[:, None], truth[:, None]


def ranks_of(edges: Tensor, others: Tensor) -> Tensor:
    """Return the rank of the score of each edge, [n], from 1 on, among other scores.

    An edge comes after others with the same score, and last if its score is NaN.

    Args:
        edges: scores of edges, [n].
        others: [n, k], others for each edge, or [m], the same for all edges.
    """
    edges = edges.masked_fill(edges.isnan(), -torch.inf)
    others = others.masked_fill(others.isnan(), torch.inf)
    if others.ndim == 2:
        return 1 + (others >= edges[:, None]).sum(dim=1)
    return 1 + len(others) - torch.searchsorted(others.sort().values, edges)


class MeanOfRanks(MeanMetric):
    """Mean over edges of 1 / rank or, with `most`, the share of edges with at most that rank.

    Args:
        most: the largest rank that counts.
    """

    higher_is_better: bool = True  # type: ignore[assignment]

    def __init__(self, most: int | None = None) -> None:
        super().__init__(nan_strategy="disable")
        self.most = most

    def update(self, ranks: Tensor) -> None:  # type: ignore[override]
        super().update(1 / ranks if self.most is None else (ranks <= self.most).float())


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
