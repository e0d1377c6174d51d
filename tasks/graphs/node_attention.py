"""Writes the edges with the most attention of each node, for `predict.attention`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, distributed, nn
from torch_geometric.data import Data

from attnkit.core.arguments import at_least, choice
from attnkit.core.capture.calls import Call, EdgeCall
from attnkit.core.capture.watch import told_of_attention
from attnkit.core.kernels.record import unrecorded
from attnkit.core.running import undisturbed
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.files import write_csv
from attnkit.tasks.graphs.data import FullGraph
from attnkit.tasks.graphs.sampling import sub_graphs

Edges = tuple[str, int | str, Tensor, Tensor, Tensor]
"""Edges of a layer and head, a number or "mean": their targets, sources and weights.

Sources are numbers of nodes; −1 − v is virtual node v of the model.
"""


class NodePredictions(Callback):
    """Callback that writes `attention.csv` in a prediction: the edges with the most attention.

    A row is an edge: `node`, `layer` and `head` ("mean" over the heads, or a number from 0),
    `source`, the node that the edge comes from, and `weight`, its share of the node's attention
    before dropout, the largest first. If the data module has `node_names`, `name` follows `node`
    and `source_name` follows `source`. A self-loop that a layer adds is an edge from the node
    itself; nodes that a model adds are "virtual 0", "virtual 1", …. Attention to all nodes is left
    out. For a sampled sub-graph, the rows are edges into its seeds, and the weights are shares
    among the neighbours that were drawn.

    Args:
        folder: created if it does not exist.
        attention: whether to write it; it costs a further forward of each batch.
        top_k: edges for each node, layer and head.
        heads: "mean" over the heads, or "each".

    Raises:
        ValueError: an argument out of range.
        UserError: in a prediction, if the model has no attention along edges that can be recorded,
            or the data has many graphs.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        attention: bool = False,
        top_k: int = 5,
        heads: Literal["mean", "each"] = "mean",
    ) -> None:
        at_least(1, top_k=top_k)
        choice(("mean", "each"), heads=heads)
        self.path = Path(folder).expanduser().absolute() / "attention.csv"
        self.attention = attention
        self.top_k = top_k
        self.heads = heads
        self._found: list[Edges] = []

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        # every process has the whole graph; the first one writes it
        is_repeated = isinstance(trainer.predict_dataloaders, FullGraph)
        if not self.attention or (is_repeated and not trainer.is_global_zero):
            return
        if "number" in batch:
            raise UserError(
                "predict.attention: expected one graph, whose nodes have numbers, got many graphs"
            )
        with trainer.precision_plugin.forward_context(), unrecorded():
            for part in sub_graphs(batch):
                found = looked_at(pl_module, part, self.top_k, each_head=self.heads == "each")
                if not found:
                    raise UserError("predict.attention: the model has no attention along edges")
                self._found += found

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # also called in a process whose part of the data is empty
        if stage != "predict" or not self.attention:
            return
        found = gathered(trainer, self._found)
        if trainer.is_global_zero and found:
            names = getattr(getattr(trainer, "datamodule", None), "node_names", None)
            extra = ("name", "source_name") if names else ()
            header = ["node", *extra[:1], "layer", "head", "source", *extra[1:], "weight"]
            write_csv(self.path, header, _rows(found, names))
        self._found = []


def gathered(trainer: Trainer, found: list[Any]) -> list[Any]:
    """Return the items of all processes as one list, in the order of the processes."""
    if trainer.world_size == 1:
        return found
    parts: list[Any] = [None] * trainer.world_size
    distributed.all_gather_object(parts, found)
    return [one for part in parts for one in part]


def looked_at(module: nn.Module, batch: Data, top_k: int, *, each_head: bool) -> list[Edges]:
    """Return the `top_k` edges with the most attention of each node, or each seed of a sub-graph.

    They are in the order of layers, heads, targets and weights, the largest first.

    Raises:
        UserError: the attention of the model cannot be recorded.
    """
    found: list[Edges] = []
    times: dict[str, int] = {}
    seeds = batch.batch_size if "batch_size" in batch else batch.num_nodes
    nodes = batch.n_id.cpu() if "n_id" in batch else torch.arange(batch.num_nodes)

    def hear(call: Call) -> None:
        if not isinstance(call, EdgeCall):
            return
        times[call.layer] = times.get(call.layer, 0) + 1
        layer = call.layer + (f" #{times[call.layer]}" if times[call.layer] > 1 else "")
        used = ~call.is_replaced & (call.edge_index[1] < seeds)
        source, target = call.edge_index[:, used].cpu()
        # nodes that the model has added have numbers below 0
        numbers = torch.cat([nodes, -1 - torch.arange(call.num_nodes[0] - len(nodes))])
        weights = call.weights[used].float().cpu()
        columns: dict[int | str, Tensor] = {"mean": weights.mean(dim=1)}
        if each_head:
            columns = {head: weights[:, head] for head in range(call.num_heads)}
        for head, weight in columns.items():
            best = largest_of_each(target, weight, top_k)
            ends = numbers[target[best]], numbers[source[best]]
            found.append((layer, head, *ends, weight[best]))

    model = cast(nn.Module, module.model)
    try:
        with undisturbed(module), told_of_attention(model, hear):
            cast(Any, module).logits(batch)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"predict.attention: {first_line(error)}") from error
    return found


def largest_of_each(target: Tensor, weight: Tensor, top_k: int) -> Tensor:
    """Return the positions of the `top_k` edges with the largest weights into each target.

    They are sorted by target, then by weight, the largest first; equal weights keep their order.
    """
    order = weight.argsort(descending=True, stable=True)
    order = order[target[order].argsort(stable=True)]
    sorted_target = target[order]
    first = torch.searchsorted(sorted_target, sorted_target)
    return order[torch.arange(len(order), device=order.device) - first < top_k]


def _rows(found: list[Edges], names: list[str] | None) -> Iterator[list[Any]]:
    """Yield the rows of the table by node, in the order of layers, heads and weights: a node is in
    one batch. Tensors take a tenth of the memory of rows."""
    kinds, *ends = zip(*((edges[:2], *edges[2:]) for edges in found), strict=True)
    lengths = torch.tensor([len(weights) for weights in ends[2]])
    numbers = torch.arange(len(kinds)).repeat_interleave(lengths)
    targets, sources, weights = map(torch.cat, ends)
    for chunk in targets.argsort(stable=True).split(10_000):
        columns = (column[chunk].tolist() for column in (targets, numbers, sources, weights))
        for node, kind, source, weight in zip(*columns, strict=True):
            layer, head = kinds[kind]
            is_virtual = source < 0
            yield [
                node, *([names[node]] if names else []), layer or "(model)", head,
                f"virtual {-1 - source}" if is_virtual else source,
                *(["" if is_virtual else names[source]] if names else []), f"{weight:.6f}",
            ]  # fmt: skip
