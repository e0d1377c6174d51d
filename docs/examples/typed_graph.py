"""Train a Heterogeneous Graph Transformer on a small graph of authors, papers and venues.

    python docs/examples/typed_graph.py [--steps 100]

An author's field is to be found. Features of authors and papers say nothing, citations neither:
only the venues of an author's papers have a field. So the model must learn which edge types to
follow, and the weights of its first layer show that it did: papers look at their venues.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import HeteroData

from attnkit import HGTAttention, TypedEdges

FIELDS, VENUES, AUTHORS, PAPERS = 4, 12, 200, 600


def make_graph(seed: int = 0) -> HeteroData:
    """Three papers an author, nine in ten in a venue of the author's field."""
    draw = torch.Generator().manual_seed(seed)
    field = torch.randint(FIELDS, (AUTHORS,), generator=draw)
    paper, author = torch.arange(PAPERS), torch.arange(PAPERS) % AUTHORS
    is_stray = torch.rand(PAPERS, generator=draw) < 0.1
    of_paper = torch.where(
        is_stray, torch.randint(FIELDS, (PAPERS,), generator=draw), field[author]
    )
    venue = of_paper + FIELDS * torch.randint(VENUES // FIELDS, (PAPERS,), generator=draw)
    data = HeteroData()
    data["author"].x = torch.randn(AUTHORS, 2, generator=draw)
    data["author"].y = field
    data["author"].is_train = torch.rand(AUTHORS, generator=draw) < 0.5
    data["paper"].x = torch.randn(PAPERS, 2, generator=draw)
    data["venue"].x = torch.eye(VENUES)
    data["author", "writes", "paper"].edge_index = torch.stack([author, paper])
    data["paper", "written_by", "author"].edge_index = torch.stack([paper, author])
    data["paper", "is_in", "venue"].edge_index = torch.stack([paper, venue])
    data["venue", "prints", "paper"].edge_index = torch.stack([venue, paper])
    cites = torch.randint(PAPERS, (2, 3 * PAPERS), generator=draw)
    data["paper", "cites", "paper"].edge_index = cites
    return data


class HGT(nn.Module):
    def __init__(self, data: HeteroData, dim: int = 32) -> None:
        super().__init__()
        self.first = HGTAttention(-1, dim, data.metadata(), heads=4)
        self.second = HGTAttention(dim, dim, data.metadata(), heads=4)
        self.head = nn.Linear(dim, FIELDS)

    def forward(self, x_dict: dict[str, Tensor], edges: TypedEdges) -> Tensor:
        return self.head(self.second(self.first(x_dict, edges), edges)["author"])


def main(steps: int = 100) -> float:
    torch.manual_seed(0)
    data = make_graph()
    edges = TypedEdges(data.edge_index_dict, data.num_nodes_dict)  # sorted once, for all layers
    model = HGT(data)
    model(data.x_dict, edges)  # tells the first layer how many channels each node type has
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=1.0)
    author = data["author"]
    for _ in range(steps):
        logits = model(data.x_dict, edges)
        loss = F.cross_entropy(logits[author.is_train], author.y[author.is_train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = model(data.x_dict, edges).argmax(dim=1) == author.y
        weights = edges.by_type(model.first.attention_weights(data.x_dict, edges))
    accuracy = float(right[~author.is_train].float().mean())
    print(f"test accuracy {accuracy:.3f}, by chance {1 / FIELDS:.3f}")
    into_papers = {key: rows for key, rows in weights.items() if key[2] == "paper"}
    num_edges = sum(len(rows) for rows in into_papers.values())
    for key, rows in into_papers.items():
        weight = float(rows.mean(dim=1).sum()) / PAPERS
        print(
            f"{' '.join(key)}: {len(rows) / num_edges:.2f} of the edges, {weight:.2f} of the weight"
        )
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
