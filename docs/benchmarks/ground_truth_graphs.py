"""Whether edge methods find the edges that are right by construction, in networks of five seeds.

    python docs/benchmarks/ground_truth_graphs.py runs/graphs.jsonl [--seeds 5]

Trains GAT, GATv2 and the graph transformer (along edges alone) on DictionaryLookup, with values as
a permutation and independent, and on infection paths; asks every method about test nodes that are
classified right; and prints the table from the file, to which each network adds its rows when it
is done, so that a run goes on where it stopped. Scored is the AUROC of the right edges among those
that reach the node, the mean over nodes; `centre` is 1/degree of the node that an edge enters,
`right` the share of test nodes that are classified right. 15 minutes on one core.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev

import torch
from measure import table
from torch.nn.functional import cross_entropy
from torchmetrics.functional.classification import binary_auroc

import attnkit
from attnkit.sight.graphs.methods import EDGE_METHODS
from attnkit.tasks.node_classification import DictionaryLookupData, InfectionData

TRUTHS = {
    "dictionary_lookup": lambda seed: DictionaryLookupData(values="permutation", seed=seed),
    "dictionary_lookup values=independent": lambda seed: DictionaryLookupData(
        values="independent", seed=seed
    ),
    "infection": lambda seed: InfectionData(seed=seed),
}
MODELS = ("gat", "gatv2", "graph_transformer")
METHODS = (*EDGE_METHODS, "centre", "oracle")
LOOKUP_STEPS, INFECTION_STEPS = 400, 150
LOOKUP_GRAPHS, INFECTION_NODES = 5, 40


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
    """Test nodes that are classified right and have a truth, each with its graph, and the accuracy
    of all test nodes."""
    is_lookup = isinstance(data, DictionaryLookupData)
    graphs = [data.sets["test"][n] for n in range(LOOKUP_GRAPHS)] if is_lookup else [data.graph]
    found, right = [], []
    for graph in graphs:
        with torch.no_grad():
            is_right = model(graph.x, graph.edge_index).argmax(dim=1) == graph.y
        right.append(is_right[graph.test_mask].float().mean())
        for node in (is_right & graph.test_mask).nonzero()[:, 0].tolist():
            true = data.true_edges(graph, node)
            if true is not None:
                found.append((graph, node, true))
    return found if is_lookup else found[:INFECTION_NODES], float(torch.stack(right).mean())


def rows_of(name: str, truth: str, seed: int) -> list[dict]:
    data = TRUTHS[truth](seed)
    data.setup()
    model = trained(name, truth, data, seed)
    nodes, accuracy = asked(data, model)
    scores: dict[str, list[float]] = {name: [] for name in METHODS}
    for number, (graph, node, true) in enumerate(nodes):
        degree = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes)
        numbers = {"centre": 1 / degree[graph.edge_index[1]], "oracle": true.float()}
        for method in EDGE_METHODS:
            options = {"seed": number} if method == "random" else {}
            inputs = graph.x, graph.edge_index
            seen = attnkit.explain(model, inputs, None, method, index=node, **options)
            numbers[method] = seen.edges
        assert (seen.candidates >= true).all()
        if seen.candidates.sum() > true.sum():  # else there is nothing to tell apart
            for method, one in numbers.items():
                scores[method].append(auroc(one[seen.candidates], true[seen.candidates]))
    known = {"truth": truth, "model": name, "seed": seed, "measure": "auroc", "chance": 0.5}
    known |= {"centre": mean(scores["centre"]), "oracle": mean(scores["oracle"])}
    known |= {"right": accuracy, "num": len(scores["oracle"])}
    return [{"method": method, "score": mean(scores[method]), **known} for method in METHODS]


def auroc(scores: torch.Tensor, true: torch.Tensor) -> float:
    """Of ranks: torchmetrics puts numbers beyond 0 to 1 through a sigmoid, which ties them."""
    ranks = scores.unique(return_inverse=True)[1].double()
    return float(binary_auroc(ranks / ranks.max().clamp(min=1), true.int()))


def shown(rows: list[dict]) -> str:
    """A row for each truth and network, a column for each method: mean ± standard deviation."""

    def of(some: list[dict], key: str) -> str:
        values = [row[key] for row in some]
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        return f"{mean(values):.2f}{spread}"

    lines = []
    for truth in TRUTHS:
        for name in MODELS:
            some = [row for row in rows if (row["truth"], row["model"]) == (truth, name)]
            if some:
                by = {
                    method: [row for row in some if row["method"] == method] for method in METHODS
                }
                line = {"truth": truth, "model": name, "right": of(by["random"], "right")}
                lines.append(line | {f"`{m}`": of(part, "score") for m, part in by.items()})
    return table(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    file = arguments.file
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(row["truth"], row["model"], row["seed"]) for row in rows}
    for seed in range(arguments.seeds):
        for truth in TRUTHS:
            for name in MODELS:
                if (truth, name, seed) not in done:
                    more = rows_of(name, truth, seed)
                    rows += more
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with file.open("a") as opened:
                        opened.writelines(json.dumps(row) + "\n" for row in more)
    print(shown(rows))
