"""Training GAT on Cora: a whole run with attnkit's layers and with PyG's GATConv.

    python docs/benchmarks/cora.py ROOT [--epochs 200] [--rounds 3]

The same loop for both, full batch: two layers, 8 heads × 8, then one head, ELU, dropout 0.6 of
inputs and attention, Adam 0.005, weight decay 5e-4, validation after every epoch. PyG's model has
dense features, as its examples do; attnkit's keeps them sparse and sorts the edges once. Programs
alternate; the ratio is the median of the rounds' ratios.
"""

import argparse

import torch
from measure import alternate, machine, table
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv

import attnkit
from attnkit.tasks.node_classification import PlanetoidData


class PyGs(nn.Module):
    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.first = GATConv(in_channels, 8, heads=8, dropout=0.6)
        self.second = GATConv(64, num_classes, heads=1, concat=False, dropout=0.6)

    def forward(self, x, edge_index):
        x = F.dropout(x, 0.6, self.training)
        x = F.dropout(F.elu(self.first(x, edge_index)), 0.6, self.training)
        return self.second(x, edge_index)


def train(model: nn.Module, data, x, edges, epochs: int) -> float:
    """The test accuracy at the epoch of the lowest validation loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    best = (float("inf"), 0.0)
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        logits = model(x, edges)
        F.cross_entropy(logits[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            logits = model(x, edges)
            loss = F.cross_entropy(logits[data.val_mask], data.y[data.val_mask])
            right = logits.argmax(1) == data.y
            best = min(best, (float(loss), float(right[data.test_mask].float().mean())))
    return best[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("root")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    module = PlanetoidData(arguments.root, normalize_features=True)
    module.setup()
    data = module.graph
    sparse = data.x.to_sparse_csr()
    accuracies: dict[str, list[float]] = {"PyG": [], "attnkit": []}

    def pyg() -> None:
        model = PyGs(data.num_features, 7)
        accuracies["PyG"].append(train(model, data, data.x, data.edge_index, arguments.epochs))

    def ours() -> None:
        model = attnkit.GAT(data.num_features, 64, 7)
        edges = attnkit.Edges(data.edge_index, data.num_nodes)
        accuracies["attnkit"].append(train(model, data, sparse, edges, arguments.epochs))

    times = alternate({"PyG": pyg, "attnkit": ours}, arguments.rounds, warm_up=0)
    print(f"{machine()}\n")
    rows = [
        {
            "program": name,
            f"{arguments.epochs} epochs": f"{times.median(name):.1f} s",
            "test accuracy": ", ".join(f"{100 * value:.1f} %" for value in accuracies[name]),
        }
        for name in times.seconds
    ]
    print(table(rows))
    print(f"\nPyG's time / attnkit's: {times.ratio('PyG', 'attnkit'):.1f}")
