"""Callback for tests of node classification: accuracy by neighbourhood, entropy of attention."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch_geometric.data import Data

from attnkit.core.capture.watch import told_of_attention
from attnkit.core.kernels.record import unrecorded
from attnkit.core.running import undisturbed
from attnkit.interpret.diagnosis import Recorder
from attnkit.interpret.head_measures import Sampling
from attnkit.interpret.picture import save
from attnkit.lightning.console import say
from attnkit.lightning.files import write_csv
from attnkit.tasks.graphs.data import FullGraph
from attnkit.tasks.graphs.layerwise import sub_graphs
from attnkit.tasks.graphs.report.neighbourhoods import (
    GroupScore,
    NeighbourhoodScores,
    in_degrees,
    label_homophily,
)
from attnkit.tasks.graphs.report.pictures import (
    degrees_of,
    draw_entropies,
    draw_groups,
    layer_of,
)


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
