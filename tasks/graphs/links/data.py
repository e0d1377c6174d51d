"""Edges of a graph that are held out, and the pairs of nodes that they are told from."""

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric.data import Data
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import is_undirected

from attnkit.core.arguments import at_least, held_out
from attnkit.lightning.errors import UserError
from attnkit.lightning.modules.trained_on import KnowsItsTraining, unknown_part, was_trained_on
from attnkit.tasks.graphs.checks import CARRIED, SPLITS
from attnkit.tasks.graphs.links.absent import AbsentPairs
from attnkit.tasks.graphs.neighbors import generator_of
from attnkit.tasks.summary import split_line

SPLITTING = (
    *("val_fraction", "test_fraction", "split_name"),
    *("num_train_per_class", "num_val", "num_test"),
)


class Links:
    """What is asked of the edges of a graph: the argument `links` of a `GraphDataModule`.

    A share of the edges is held out by PyG's `RandomLinkSplit`, an undirected edge with both of its
    directions. What is known of the graph, and carries messages, is in training and validation the
    other edges, in the test those and the edges of validation, and in a prediction every edge.
    Self-loops are left out, and of edges that are given twice the first counts. Labels and splits
    of the nodes are not read.

    A step of training has the whole graph and `batch_size` edges of it, which carry no messages in
    that step, as the edges that are held out do not; and for each `num_negatives` pairs of nodes
    that are joined in no split. These are drawn by the seed, the epoch and the edges of the batch.
    Validation and test have one batch, in which each edge, an undirected one from both of its ends,
    comes with one such pair, and to be ranked among them with `num_ranked` that have the same
    source; these are the same each time.

    Args:
        val_fraction, test_fraction: of the edges.
        num_negatives: absent pairs for each edge in training.
        num_ranked: absent pairs that an edge of val or test is ranked among.
        top_k: pairs that are predicted for each node.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        *,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        num_negatives: int = 1,
        num_ranked: int = 100,
        top_k: int = 5,
    ) -> None:
        held_out(val_fraction=val_fraction, test_fraction=test_fraction)
        at_least(1, num_negatives=num_negatives, num_ranked=num_ranked, top_k=top_k)
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.num_negatives = num_negatives
        self.num_ranked = num_ranked
        self.top_k = top_k

    def check(self, data: Any) -> None:
        """ValueError if a data module has settings that are for its nodes."""
        if data.batch_size is None:
            raise ValueError("batch_size: with links: expected the edges of a step, got None")
        only = {"target": "classes", "split": 0, "positions": None, "num_neighbors": [10, 10]}
        only |= {"evaluation": None, "sampler": "attnkit"}
        if wrong := _other_than(data, only):
            raise ValueError(wrong)

    def check_splits(self, data: Any) -> None:
        """UserError if a data module has settings of how its nodes are split."""
        given = inspect.signature(type(data).__init__).parameters
        if wrong := _other_than(data, {n: given[n].default for n in SPLITTING if n in given}):
            raise UserError(f"data.{wrong}")


def _other_than(data: Any, only: dict[str, Any]) -> str | None:
    """What is wrong with the first of the settings that has another value."""
    for name, value in only.items():
        if (given := getattr(data, name)) != value:
            return (
                f"{name}: it is for the nodes of a graph, with links expected {value}, got {given}"
            )
    return None


class LinkSets:
    """The edges of one graph in three splits; see `Links`.

    Args:
        graph: x [nodes, channels], edge_index [2, edges], maybe edge_attr and edge_weight.
        links: what is asked.
        seed: of the splits and the absent pairs.

    Raises:
        UserError: no edges, or a pair of nodes is absent nowhere.
    """

    def __init__(self, graph: Data, links: Links, seed: int) -> None:
        self.links = links
        self.seed = seed
        self.x: Tensor = graph.x.float()
        self.num_nodes = len(self.x)
        self.known = _once(graph, self.num_nodes)
        edge_index: Any = self.known.edge_index
        # whatever its directions carry: where one is held out, the other must not say so
        self.directed = not is_undirected(edge_index, num_nodes=self.num_nodes)
        self.absent = AbsentPairs(edge_index, self.num_nodes)
        if not len(self.absent):
            raise UserError(
                f"data: all of its {self.num_nodes} nodes are joined to each other, expected pairs "
                "without an edge"
            )

    @cached_property
    def splits(self) -> dict[str, Data]:
        """Of each split `edge_index`, the edges that carry messages, and `edge_label_index`, those
        that are asked about: of an undirected edge one direction."""
        fractions = {"val": self.links.val_fraction, "test": self.links.test_fraction}
        count = self.known.num_edges // (1 if self.directed else 2)
        for name, fraction in fractions.items():
            if not int(fraction * count):
                raise UserError(
                    f"data.links.{name}_fraction: expected an edge at least, got {fraction} of "
                    f"{count} edges"
                )
        split = RandomLinkSplit(
            *fractions.values(),
            is_undirected=not self.directed,
            add_negative_train_samples=False,
            neg_sampling_ratio=0.0,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            splits = dict(zip(SPLITS, split(self.known), strict=True))
        numbers = self._numbers(self.known.edge_index)
        for part in splits.values():  # each direction with what it carries
            places = torch.searchsorted(numbers, self._numbers(part.edge_index))
            part.update({name: self.known[name][places] for name in CARRIED if name in self.known})
        return splits

    def _numbers(self, edge_index: Any) -> Tensor:
        """A number of each edge, ordered as the known edges are."""
        return edge_index[0] * self.num_nodes + edge_index[1]

    def items(self, split: str, batch_size: int) -> "LinkItems":
        """What the loader of a split reads; of "predict" the nodes.

        Raises:
            UserError: too few edges would carry messages in a step of training.
        """
        if split == "predict":
            return EveryPair(self.known, self)
        if split != "train":
            return RankedLinks(self.splits[split], self, split)
        items = TrainLinks(self.splits[split], self)
        if 2 * batch_size > len(items):
            raise UserError(
                f"data.batch_size: expected at most {len(items) // 2}, half of the {len(items)} "
                f"edges to train on: those of a batch carry no messages; got {batch_size}"
            )
        return items

    def tested(self, module: Any, node_keys: Tensor) -> "LinkItems":
        """The edges to test; not those that the module was trained on, of another split."""
        items = RankedLinks(self.splits["test"], self, "test")
        if not isinstance(module, KnowsItsTraining):
            return items
        known = was_trained_on(module, self.keys(node_keys, items.pairs))
        if known is None:
            rank_zero_warn("test: it is not known which edges the module was trained on")
            return items
        more, total = unknown_part(module), len(items)
        items.chosen = (~known).nonzero().flatten()
        if not len(items):
            raise UserError(
                f"data: expected edges to test, got none: all {total:,} were in the module's "
                f"training{more}\n  test it with the data.seed and fractions of its training"
            )
        if more or known.any():
            rank_zero_warn(
                f"test: {len(items):,} of {total:,} edges; the others were in the module's "
                f"training, whose split was another{more}"
            )
        return items

    def training_keys(self, node_keys: Tensor) -> Tensor:
        """Keys of the edges of train and val; see `KnowsItsTraining`."""
        pairs = [self.splits[name].edge_label_index for name in ("train", "val")]
        return self.keys(node_keys, torch.cat(pairs, dim=1))

    def keys(self, node_keys: Tensor, pairs: Tensor) -> Tensor:
        """A key of each pair by those of its nodes; of an undirected graph in any order."""
        source, target = node_keys[pairs]
        return source + target * (3 if self.directed else 1)

    def describe(self) -> dict[str, Any]:
        """What a model and `LinkPrediction` need to know."""
        edge_attr = self.known.get("edge_attr")
        return {
            "in_channels": self.x.shape[1],
            "directed": self.directed,
            **({} if edge_attr is None else {"edge_dim": edge_attr.shape[1]}),
        }

    def summary(self) -> list[str]:
        """What was found, in a few lines."""
        counts = {name: part.edge_label_index.shape[1] for name, part in self.splits.items()}
        kind = "a directed" if self.directed else "an undirected"
        return [
            split_line("edges", counts, f" of {kind} graph"),
            f"  of {self.num_nodes:,} nodes with {self.x.shape[1]:,} features; "
            f"ranked among {self.links.num_ranked:,} other pairs each",
        ]


class LinkItems(Dataset):
    """Edges of a split, fetched by the batch, with the graph that is known meanwhile.

    Args:
        known: the edges that carry messages, and in `edge_label_index` those to fetch.
        sets: what else there is of the graph.
        split: whose they are.
    """

    def __init__(self, known: Data, sets: LinkSets, split: str = "predict") -> None:
        self.sets = sets
        self.known = {name: known[name] for name in ("edge_index", *CARRIED) if name in known}
        self.pairs: Tensor = known.get("edge_label_index", torch.empty((2, 0), dtype=torch.long))
        self.chosen = torch.arange(self.pairs.shape[1])
        """Which of the pairs there are."""

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, number: Any) -> Data:
        return self.__getitems__([number])

    def __getitems__(self, numbers: Sequence[Any]) -> Data:
        raise NotImplementedError


class TrainLinks(LinkItems):
    """Batches of the training; their own edges carry no messages. See `Links`."""

    def __getitems__(self, numbers: Sequence[int | tuple[int, int]]) -> Data:
        drawn = torch.as_tensor([(0, n) if isinstance(n, int) else n for n in numbers])
        places = drawn[:, 1]
        carries = torch.ones(self.known["edge_index"].shape[1], dtype=torch.bool)
        # RandomLinkSplit gives the edges in the order of the pairs, then their other directions
        carries.view(-1, len(self))[:, places] = False
        known = {name: v[..., carries] if name == "edge_index" else v[carries]
                 for name, v in self.known.items()}  # fmt: skip
        generator = generator_of(self.sets.seed, drawn)
        count = len(places) * self.sets.links.num_negatives
        return Data(
            x=self.sets.x,
            pairs=self.pairs[:, places],
            negatives=self.sets.absent.draw(count, generator),
            **known,
        )


class RankedLinks(LinkItems):
    """Batches of validation and test: edges, and what they are ranked among. See `Links`."""

    def __init__(self, known: Data, sets: LinkSets, split: str) -> None:
        super().__init__(known, sets, split)
        if not sets.directed:
            self.pairs = torch.cat([self.pairs, self.pairs.flip(0)], dim=1)
        self.chosen = torch.arange(self.pairs.shape[1])
        state = np.random.SeedSequence([sets.seed, SPLITS.index(split)]).generate_state(1)
        generator = torch.Generator().manual_seed(int(state[0]))
        self.negatives = sets.absent.draw(len(self), generator)
        self.ranked = sets.absent.draw_from(self.pairs[0], sets.links.num_ranked, generator)

    def __getitems__(self, numbers: Sequence[int]) -> Data:
        places = self.chosen[torch.as_tensor(numbers)]
        return Data(
            x=self.sets.x,
            pairs=self.pairs[:, places],
            negatives=self.negatives[:, places],
            ranked=self.ranked[:, places],
            **self.known,
        )


class EveryPair(LinkItems):
    """Batches of a prediction: nodes, each of which is asked about all that it is not joined to."""

    def __len__(self) -> int:
        return self.sets.num_nodes

    def __getitems__(self, numbers: Sequence[int]) -> Data:
        return Data(
            x=self.sets.x,
            sources=torch.as_tensor(numbers),
            present=self.sets.absent.present,
            top_k=self.sets.links.top_k,
            **self.known,
        )


def _once(graph: Data, num_nodes: int) -> Data:
    """The edges of a graph without self-loops and repeats, and what they carry; sorted."""
    source, target = graph.edge_index.long()
    numbers, order = (source * num_nodes + target).sort(stable=True)
    is_new = torch.ones_like(order, dtype=torch.bool)
    is_new[1:] = numbers[1:] != numbers[:-1]
    chosen = order[is_new & (source != target)[order]]
    carried = {name: graph[name][chosen] for name in CARRIED if name in graph}
    return Data(edge_index=torch.stack([source, target])[:, chosen], num_nodes=num_nodes, **carried)
