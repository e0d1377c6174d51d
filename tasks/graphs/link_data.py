"""Splits of a graph's edges for link prediction, and pairs of nodes without an edge."""

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import is_undirected

from attnkit.core.arguments import at_least, held_out
from attnkit.lightning.errors import UserError
from attnkit.lightning.modules.module import TaskModule, unknown_part, was_trained_on
from attnkit.tasks.graphs.base import CARRIED, SPLITS
from attnkit.tasks.graphs.negative_pairs import AbsentPairs, HeldOut
from attnkit.tasks.graphs.sampling import generator_of
from attnkit.tasks.loaders import BatchItems
from attnkit.tasks.summary import split_line

SPLITTING = (
    *("val_fraction", "test_fraction", "split_name"),
    *("num_train_per_class", "num_val", "num_test"),
)


class Links:
    """Settings of link prediction: the argument `links` of a `GraphDataModule`.

    PyG's `RandomLinkSplit` holds out a share of the edges, an undirected edge in both directions.
    In training and validation, the other edges are known and carry messages; in the test, these and
    the edges of validation; in a prediction, all edges. Self-loops are left out, and the first of
    repeated edges counts. Labels and splits of the nodes are not read.

    If the data has its own `link_splits`, nothing else is held out: the edges of the graph are for
    training, and only they carry messages, also in the test and in a prediction. An edge of val or
    test is then ranked among the pairs that are given for it, if any are.

    A step of training has the whole graph and `batch_size` of its edges, which carry no messages in
    that step, just as held-out edges; and `num_negatives` pairs for each of these edges that are
    joined in no split, drawn by the seed, the epoch and the edges of the batch. (With `link_splits`
    they are pairs that are no training edges.) Validation and test have one batch. Each edge in it,
    an undirected one from both of its ends, comes with one absent pair, and with `num_ranked`
    absent pairs of the same source to be ranked among; these are the same each time.

    Args:
        val_fraction, test_fraction: shares of the edges.
        num_negatives: number of absent pairs for each edge in training.
        num_ranked: number of absent pairs among which an edge of val or test is ranked.
        top_k: number of pairs predicted for each node.

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
        """Raise a `ValueError` if a data module has settings for the prediction of nodes."""
        if data.batch_size is None:
            raise ValueError("batch_size: with links: expected the edges of a step, got None")
        only = {"target": "classes", "split": 0, "positions": None, "num_neighbors": [10, 10]}
        only |= {"evaluation": None, "sampler": "attnkit"}
        if wrong := _first_other(data, only):
            raise ValueError(wrong)

    def check_splits(self, data: Any) -> None:
        """Raise a `UserError` for settings without effect.

        These are splits of nodes in the data module; and, if the data has its own splits, fractions
        and, if it has pairs to rank all edges among, `num_ranked`.
        """
        names = [name for name in SPLITTING if name != "split_name" or not data.link_splits]
        if wrong := _first_other(data, _defaults(type(data), names)):
            raise UserError(f"data.{wrong}")
        if not data.link_splits:
            return
        names = ["val_fraction", "test_fraction"]
        if all(held.absent is not None for held in data.link_splits.values()):
            names.append("num_ranked")
        if wrong := _first_other(self, _defaults(Links, names), "the data has its own splits,"):
            raise UserError(f"data.links.{wrong}")


def _defaults(cls: type, names: Sequence[str]) -> dict[str, Any]:
    given = inspect.signature(cls).parameters
    return {name: given[name].default for name in names if name in given}


def _first_other(
    data: Any, only: dict[str, Any], why: str = "it is for the nodes of a graph, with links"
) -> str | None:
    """Return an error text for the first setting with another value than in `only`, or None."""
    for name, value in only.items():
        if (given := getattr(data, name)) != value:
            return f"{name}: {why} expected {value}, got {given}"
    return None


class LinkSets:
    """The edges of one graph in three splits; see `Links`.

    Args:
        graph: x [nodes, channels], edge_index [2, edges], maybe edge_attr and edge_weight.
        links: the settings.
        seed: seed of the splits and the absent pairs.
        given: the edges of "val" and "test", if the data has them; otherwise they are drawn.

    Raises:
        UserError: all nodes are joined to each other, or `given` has other splits or nodes.
    """

    def __init__(
        self, graph: Data, links: Links, seed: int, given: Mapping[str, HeldOut] | None = None
    ) -> None:
        self.links = links
        self.seed = seed
        self.x: Tensor = graph.x.float()
        self.num_nodes = len(self.x)
        self.known = _once(graph, self.num_nodes)
        edge_index: Any = self.known.edge_index
        # without the edges' attributes: if one direction is held out, the other must not reveal it
        self.directed = not is_undirected(edge_index, num_nodes=self.num_nodes)
        self.given = given or {}
        if self.given and self.given.keys() != {"val", "test"}:
            raise UserError(f"data.link_splits: expected val and test, got {', '.join(self.given)}")
        held, known = [edge_index], self._numbers(edge_index)
        for split, one in self.given.items():
            one.check(self.num_nodes)
            held += [one.pairs] if self.directed else [one.pairs, one.pairs.flip(0)]
            if count := int(torch.isin(self._numbers(one.pairs), known).sum()):
                total = one.pairs.shape[1]
                rank_zero_warn(f"data: {count:,} of {total:,} edges of {split} are trained on, too")
        self.absent = AbsentPairs(torch.cat(held, dim=1), self.num_nodes)
        if not len(self.absent):
            raise UserError(
                f"data: all of its {self.num_nodes} nodes are joined to each other, expected pairs "
                "without an edge"
            )

    @cached_property
    def splits(self) -> dict[str, Data]:
        """Return for each split the edges that carry messages and those to predict.

        They are `edge_index` and `edge_label_index`; the latter has one direction of an undirected
        edge. In training, `edge_index` holds the edges in the order of `edge_label_index`, followed
        by their reverses in an undirected graph.

        Raises:
            UserError: a fraction holds out no edge.
        """
        splits = self._given_splits() if self.given else self._random_splits()
        numbers = self._numbers(self.known.edge_index)
        for part in splits.values():  # add the attributes of each direction
            places = torch.searchsorted(numbers, self._numbers(part.edge_index))
            part.update({name: self.known[name][places] for name in CARRIED if name in self.known})
        return splits

    def _given_splits(self) -> dict[str, Data]:
        known: Any = self.known.edge_index
        pairs = known if self.directed else known[:, known[0] < known[1]]
        messages = pairs if self.directed else torch.cat([pairs, pairs.flip(0)], dim=1)
        edges = {"train": pairs, **{split: one.pairs for split, one in self.given.items()}}
        return {split: Data(edge_index=messages, edge_label_index=edges[split]) for split in SPLITS}

    def _random_splits(self) -> dict[str, Data]:
        fractions = {"val": self.links.val_fraction, "test": self.links.test_fraction}
        count = self.known.num_edges // (1 if self.directed else 2)
        for name, fraction in fractions.items():
            if not int(fraction * count):
                raise UserError(
                    f"data.links.{name}_fraction: expected at least one edge, got {fraction} of "
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
            return dict(zip(SPLITS, split(self.known), strict=True))

    def _numbers(self, edge_index: Any) -> Tensor:
        """Return a number of each edge, in whose order the known edges are sorted."""
        return edge_index[0] * self.num_nodes + edge_index[1]

    def items(self, split: str, batch_size: int) -> "LinkItems":
        """Return the data set of a split; for "predict" that of the nodes.

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
        """Return the data set of the test without edges that the module was trained on.

        A module that was trained with another split may know some of the test edges; a warning
        counts them.

        Raises:
            UserError: the module was trained on all edges.
        """
        items = RankedLinks(self.splits["test"], self, "test")
        if not isinstance(module, TaskModule):
            return items
        keys = self.keys(node_keys, items.pairs)
        known = was_trained_on(module, keys)
        if known is None:
            rank_zero_warn("test: it is not known which edges the module was trained on")
            return items
        known &= ~torch.isin(keys, self.training_keys(node_keys))  # given splits may share some
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
        """Return keys of the edges of train and val; see `TaskModule`."""
        pairs = [self.splits[name].edge_label_index for name in ("train", "val")]
        return self.keys(node_keys, torch.cat(pairs, dim=1))

    def keys(self, node_keys: Tensor, pairs: Tensor) -> Tensor:
        """Return a key of each pair by those of its nodes, in any order if undirected."""
        source, target = node_keys[pairs]
        return source + target * (3 if self.directed else 1)

    def describe(self) -> dict[str, Any]:
        """Return the facts that a model and `LinkPrediction` need."""
        edge_attr = self.known.get("edge_attr")
        return {
            "in_channels": self.x.shape[1],
            "directed": self.directed,
            **({} if edge_attr is None else {"edge_dim": edge_attr.shape[1]}),
        }

    def summary(self) -> list[str]:
        """Return a summary of the data in a few lines."""
        counts = {name: part.edge_label_index.shape[1] for name, part in self.splits.items()}
        absent = self.given["test"].absent if self.given else None
        among = self.links.num_ranked if absent is None else absent.shape[-1]
        return [
            split_line("edges", counts, ""),
            f"  of {self}; ranked among {among:,} other pairs each",
        ]

    def __str__(self) -> str:
        kind = "a directed" if self.directed else "an undirected"
        return f"{kind} graph of {self.num_nodes:,} nodes with {self.x.shape[1]:,} features"


class LinkItems(BatchItems):
    """Data set of the edges of a split, fetched by the batch with the graph known at that time.

    Args:
        known: the edges that carry messages, and in `edge_label_index` those to fetch.
        sets: the splits and the other data of the graph.
    """

    def __init__(self, known: Data, sets: LinkSets) -> None:
        self.sets = sets
        self.known = {name: known[name] for name in ("edge_index", *CARRIED) if name in known}
        self.pairs: Tensor = known.get("edge_label_index", torch.empty((2, 0), dtype=torch.long))
        self.chosen = torch.arange(self.pairs.shape[1])
        """Positions of the pairs that are items."""

    def __len__(self) -> int:
        return len(self.chosen)


class TrainLinks(LinkItems):
    """Data set of training; the edges of a batch carry no messages. See `Links`."""

    def __init__(self, known: Data, sets: LinkSets) -> None:
        super().__init__(known, sets)
        # Given splits must not be known in training: their edges may occur as negatives, too.
        edges = self.known["edge_index"]
        self.absent = AbsentPairs(edges, sets.num_nodes) if sets.given else sets.absent

    def __getitems__(self, numbers: Sequence[int | tuple[int, int]]) -> Data:
        drawn = torch.as_tensor([(0, n) if isinstance(n, int) else n for n in numbers])
        places = drawn[:, 1]
        carries = torch.ones(self.known["edge_index"].shape[1], dtype=torch.bool)
        carries.view(-1, len(self))[:, places] = False
        known = {name: v[..., carries] if name == "edge_index" else v[carries]
                 for name, v in self.known.items()}  # fmt: skip
        generator = generator_of(self.sets.seed, drawn)
        count = len(places) * self.sets.links.num_negatives
        return Data(
            x=self.sets.x,
            pairs=self.pairs[:, places],
            negatives=self.absent.draw(count, generator),
            **known,
        )


class RankedLinks(LinkItems):
    """Data set of validation or test: edges, and the pairs to rank them among. See `Links`."""

    def __init__(self, known: Data, sets: LinkSets, split: str) -> None:
        super().__init__(known, sets)
        absent = sets.given[split].absent if sets.given else None
        if not sets.directed and absent is None:
            self.pairs = torch.cat([self.pairs, self.pairs.flip(0)], dim=1)
        self.chosen = torch.arange(self.pairs.shape[1])
        if absent is None:
            state = np.random.SeedSequence([sets.seed, SPLITS.index(split)]).generate_state(1)
            generator = torch.Generator().manual_seed(int(state[0]))
            self.negatives = sets.absent.draw(len(self), generator)
            absent = sets.absent.draw_from(self.pairs[0], sets.links.num_ranked, generator)
        else:
            self.negatives = absent if absent.ndim == 2 else absent[:, :, 0]
        self.ranked = absent
        self._owner = torch.arange(self.negatives.shape[1]) % self.pairs.shape[1]
        """Position of the pair that each negative comes with, so that it counts in one process."""

    def __getitems__(self, numbers: Sequence[int]) -> Data:
        places = self.chosen[torch.as_tensor(numbers)]
        return Data(
            x=self.sets.x,
            pairs=self.pairs[:, places],
            negatives=self.negatives[:, torch.isin(self._owner, places)],
            ranked=self.ranked[:, places] if self.ranked.ndim == 3 else self.ranked,
            **self.known,
        )


class EveryPair(LinkItems):
    """Data set of prediction: nodes, each to be paired with all nodes that it is not joined to."""

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
    """Return the sorted edges of a graph without self-loops and repeats, with attributes."""
    source, target = graph.edge_index.long()
    numbers, order = (source * num_nodes + target).sort(stable=True)
    is_new = numbers.diff(prepend=numbers.new_full((1,), -1)) != 0
    chosen = order[is_new & (source != target)[order]]
    carried = {name: graph[name][chosen] for name in CARRIED if name in graph}
    return Data(edge_index=torch.stack([source, target])[:, chosen], num_nodes=num_nodes, **carried)
