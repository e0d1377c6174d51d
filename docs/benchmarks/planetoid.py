"""Training GAT on a citation graph: a whole run with attnkit's layers and with PyG's GATConv.

    python docs/benchmarks/planetoid.py ROOT [--name Cora] [--epochs 200] [--rounds 3] [--threads 1]

The same loop for both, full batch: two layers, 8 heads × 8, then one head, ELU, dropout 0.6 of
inputs and attention, Adam 0.005, weight decay 5e-4, validation after every epoch. PyG's model has
dense features and computes every node, as its examples do. attnkit's is what `task=graph` runs:
sparse features, edges that are sorted once, and of each split what its nodes depend on
(`ReceptiveField`), which is found anew in every run. Programs alternate; the ratio is the median of
the rounds' ratios.
"""

import argparse

import torch
from measure import alternate, machine, table
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv

import attnkit
from attnkit.layers import ReceptiveField
from attnkit.tasks.graphs import PlanetoidData


class PyGs(nn.Module):
    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.first = GATConv(in_channels, 8, heads=8, dropout=0.6)
        self.second = GATConv(64, num_classes, heads=1, concat=False, dropout=0.6)

    def forward(self, x, edge_index):
        x = F.dropout(x, 0.6, self.training)
        x = F.dropout(F.elu(self.first(x, edge_index)), 0.6, self.training)
        return self.second(x, edge_index)


def train(model: nn.Module, data, logits, epochs: int) -> float:
    """The test accuracy at the epoch of the lowest validation loss; `logits` of a split."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    labels = {split: data.y[data[f"{split}_mask"]] for split in ("train", "val", "test")}
    best = (float("inf"), {})
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(logits("train"), labels["train"]).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = float(F.cross_entropy(logits("val"), labels["val"]))
            if loss < best[0]:
                best = (loss, {name: tensor.clone() for name, tensor in model.state_dict().items()})
    model.load_state_dict(best[1])
    with torch.no_grad():
        return float((logits("test").argmax(1) == labels["test"]).float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("root")
    parser.add_argument("--name", default="Cora")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    module = PlanetoidData(arguments.root, name=arguments.name, normalize_features=True)
    module.setup()
    data, num_classes = module.graph, module.num_classes
    dense, sparse = data.x.to_dense(), data.x.to_dense().to_sparse_csr()
    accuracies: dict[str, list[float]] = {"PyG": [], "attnkit": []}

    def pyg() -> None:
        model = PyGs(data.num_features, num_classes)

        def logits(split: str):
            return model(dense, data.edge_index)[data[f"{split}_mask"]]

        accuracies["PyG"].append(train(model, data, logits, arguments.epochs))

    def ours() -> None:
        model = attnkit.GAT(data.num_features, 64, num_classes)
        parts = {}
        for split in ("train", "val", "test"):
            wanted = data[f"{split}_mask"].nonzero().squeeze(1)
            field = ReceptiveField.of(data.edge_index, data.num_nodes, wanted, model.num_hops)
            parts[split] = field.rows(sparse), field

        accuracies["attnkit"].append(
            train(model, data, lambda split: model(*parts[split]), arguments.epochs)
        )

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
