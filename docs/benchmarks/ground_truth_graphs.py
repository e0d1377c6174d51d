"""Tests whether methods find the edges that are right by construction, with five seeds.

    python docs/benchmarks/ground_truth_graphs.py runs/graphs.jsonl [--seeds 5]

Trains GAT, GATv2 and the graph transformer (along edges alone) on DictionaryLookup, with values as
a permutation and independent, and on infection paths; asks every method about test nodes that are
classified right; and prints the tables from the file, to which each network adds its rows when it
is done, so that a run goes on where it stopped. Scored is the AUROC of the right edges among those
that reach the node, the mean over nodes; `centre` is 1/degree of the node that an edge enters,
`answered right` the share of test nodes that are classified right, and `without it` the share of
those asked about that still are without their right edges. 16 minutes of one core's time.
"""

import argparse
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.utils import k_hop_subgraph
from torchmetrics.functional.classification import binary_auroc
from truths import Row, details, kept, overview

import attnkit
from attnkit.interpret.methods.table import METHODS, methods_of
from attnkit.interpret.trust.judge import spearman, with_random_weights
from attnkit.tasks.graphs import DictionaryLookupData, InfectionData

TRUTHS = {
    "lookup, permutation": partial(DictionaryLookupData, values="permutation"),
    "lookup, independent": partial(DictionaryLookupData, values="independent"),
    "infection": InfectionData,
}
MODELS = ("gat", "gatv2", "graph_transformer")
NAMES = (*methods_of("edge"), "centre")
LOOKUP_STEPS, INFECTION_STEPS = 400, 150
LOOKUP_GRAPHS, NODES, HOPS = 20, 30, 3


def make(name: str, truth: str, data) -> torch.nn.Module:
    """One layer of one head for one edge, three layers for paths of three edges."""
    width, layers, heads = (32, 3, 4) if truth == "infection" else (128, 1, 1)
    shared = {"num_layers": layers, "heads": heads, "mlp_ratio": 1.0}
    shared |= {"dropout_p": 0.0, "attention_dropout_p": 0.0, "activation": "gelu"}
    if name == "graph_transformer":
        made = attnkit.GraphTransformer
        shared |= {"local": "scaled_dot", "global_attention": None}
    else:
        made = attnkit.GAT
        shared |= {"score": name, "norm": "layer", "add_self_loops": False}
    return made(data.in_channels, width, data.num_classes, **shared)


def trained(name: str, truth: str, data, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = make(name, truth, data)
    is_lookup = isinstance(data, DictionaryLookupData)
    steps = LOOKUP_STEPS if is_lookup else INFECTION_STEPS
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if is_lookup else 5e-3)
    batches = iter(())
    for _ in range(steps):
        batch = next(batches, None)
        if batch is None:
            batches = iter(data.loader("train"))
            batch = next(batches)
        logits = model(batch.x, batch.edge_index)
        loss = cross_entropy(logits[batch.train_mask], batch.y[batch.train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def asked(data, model) -> tuple[list, float]:
    """Test nodes that are classified right and have a truth, and the accuracy of all test nodes.

    Of each the features and edges of what it can see, its number there, and which edges are right.
    """
    is_lookup = isinstance(data, DictionaryLookupData)
    graphs = [data.sets["test"][n] for n in range(LOOKUP_GRAPHS)] if is_lookup else [data.graph]
    found, right = [], []
    for graph in graphs:
        with torch.no_grad():
            is_right = model(graph.x, graph.edge_index).argmax(dim=1) == graph.y
        right.append(is_right[graph.test_mask].float().mean())
        for node in (is_right & graph.test_mask).nonzero()[:, 0].tolist():
            true = data.true_edges(graph, node)
            if true is not None and len(found) < NODES:
                nodes, edges, number, kept = k_hop_subgraph(
                    node, HOPS, graph.edge_index, relabel_nodes=True
                )
                found.append(((graph.x[nodes], edges), int(number), true[kept]))
    return found, float(torch.stack(right).mean())


def rows_of(truth: str, name: str, seed: int) -> list[Row]:
    data = TRUTHS[truth](seed=seed)
    data.setup()
    model = trained(name, truth, data, seed)
    drawn = with_random_weights(model, torch.Generator().manual_seed(0))
    nodes, accuracy = asked(data, model)
    scores: dict[str, list[tuple[float, ...]]] = {method: [] for method in NAMES}
    without = []
    for number, (inputs, node, true) in enumerate(nodes):
        x, edge_index = inputs
        with torch.no_grad():
            first, second = model(*inputs)[node].topk(2).indices.tolist()
            without.append(model(x, edge_index[:, ~true])[node].argmax() == first)
        near = attnkit.explain(model, inputs, index=node).candidates
        assert (near >= true).all()
        if near.sum() == true.sum():  # nothing to tell apart
            continue
        for method in NAMES:
            edges, other, by_lot = (
                edges_of(method, *asked_of, inputs, node, number)[near]
                for asked_of in ((model, first), (model, second), (drawn, first))
            )
            alike = (float(spearman(edges[None], one[None])) for one in (other, by_lot))
            scores[method].append((auroc(edges, true[near]), *alike))
    known = {"measure": "auroc", "chance": 0.5, "right": accuracy, "num": len(scores["random"])}
    known["without"] = mean(map(float, without))
    rows = []
    for method, of_nodes in scores.items():
        score, other_class, random_weights = map(mean, zip(*of_nodes, strict=True))
        own = {"class_sensitivity": 1 - other_class, "random_weights": random_weights}
        rows.append({"method": method, "score": score, **own, **known})
    return rows


def edges_of(method: str, model: nn.Module, target: int, inputs, node: int, seed: int) -> Tensor:
    """The number of each edge."""
    if method == "centre":
        into = inputs[1][1]
        return 1 / torch.bincount(into)[into]
    known = METHODS[method]
    asked_for = target if known.has_target else None
    options = {"seed": seed} if "seed" in known.options("edge") else {}
    return attnkit.explain(model, inputs, asked_for, method, index=node, **options).edges


def auroc(scores: Tensor, true: Tensor) -> float:
    """Return the AUROC of ranks: torchmetrics takes a sigmoid of other scores, which ties them."""
    ranks = scores.unique(return_inverse=True)[1].double()
    return float(binary_auroc(ranks / ranks.max().clamp(min=1), true.int()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    rows = kept(arguments.file, arguments.seeds, product(TRUTHS, MODELS), rows_of)
    print(f"{overview(rows)}\n\n{details(rows)}")
