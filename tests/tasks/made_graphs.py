"""A random graph, and what OGB's evaluator computes, for the tests of the graph task."""

import numpy as np
import torch
from torch_geometric.data import Data

from attnkit.tasks.graphs import GraphDataModule

ADAM = {"_target_": "torch.optim.Adam", "lr": 0.02, "weight_decay": 5e-4}
CONSTANT = {"_target_": "torch.optim.lr_scheduler.ConstantLR", "factor": 1.0}


class RandomGraph(GraphDataModule):
    """A random graph of 5 channels; masks of 31 nodes to train, 23 to validate, 29 to test."""

    def __init__(self, classes=7, nodes=97, **options):
        super().__init__(**options)
        self.classes, self.nodes = classes, nodes

    def load(self):
        generator = torch.Generator().manual_seed(3)
        part = torch.randperm(self.nodes, generator=generator)
        if self.target == "classes":
            self.class_names = list("abcdefg"[: self.classes])
        return Data(
            x=torch.randn(self.nodes, 5, generator=generator),
            y=torch.randint(0, self.classes, (self.nodes,), generator=generator),
            edge_index=torch.randint(0, self.nodes, (2, 401), generator=generator),
            train_mask=part < 31,
            val_mask=(part >= 31) & (part < 54),
            test_mask=(part >= 54) & (part < 83),
        )


def ready(*arguments, **options):
    """A `RandomGraph` after `setup`."""
    data = RandomGraph(*arguments, **options)
    data.setup()
    return data


def ogb_hits(edges, others, k):
    """`_eval_hits` of ogb.linkproppred.Evaluator: of scores of edges among those of all others."""
    if len(others) < k:
        return 1.0
    return float(np.mean(np.asarray(edges) > np.sort(np.asarray(others))[-k]))


def ogb_ranks(edges, others):
    """The ranks of `_eval_mrr` of the same: of each edge among others of its own."""
    edges, others = np.asarray(edges)[:, None], np.asarray(others)
    return 0.5 * ((others > edges).sum(axis=1) + (others >= edges).sum(axis=1)) + 1
