"""Weights that other people trained, in attnkit's model: a GAT, tested on Cora's public split.

    python docs/benchmarks/pretrained.py CHECKPOINT ROOT [--save gat.pt]

CHECKPOINT is `models/binaries/gat_000000.pth` (365 KiB) of the public repository
gordicaleksa/pytorch-GAT at commit 39c8f0e, MIT licence: two layers, 8 heads of 8 channels, trained
by its author's code. The file states the test accuracy that he measured, 82.2 %; his README says
82 to 83 %. ROOT is a folder with the files of Planetoid, whose features he divides by the sum of
their row and whose edges he completes by self-loops, as `PlanetoidData` and `GAT` do by default.

Three networks get the weights: `attnkit.GAT`; two of PyG's `GATConv`, which knows nothing of
attnkit; and those `GATConv` carried over by `interop.from_pyg`. Their accuracies are shown with the
largest difference of a logit from attnkit's. `--save` writes the weights under attnkit's names. A
run then goes on from them; with a learning rate of 0 it tests them, and `run=explain` explains
them:

    python -m attnkit experiment=cora data.root=ROOT init=gat.pt seeds=1 run_dir=runs/gat \\
        optimizer.lr=0 trainer.max_epochs=1
    python -m attnkit run=explain ckpt=runs/gat explain.nodes=[1708,2000]

The file is read by `torch.load(weights_only=True)`, which runs no code of it.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from measure import table
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv

import attnkit
from attnkit.interop import from_pyg
from attnkit.interop.conversion import renamed
from attnkit.tasks.graphs import PlanetoidData

OURS = {
    "gat_net.": "layers.",
    ".bias": ".attention.out_bias",
    "scoring_fn_target": "attention.projections.query_vector",
    "scoring_fn_source": "attention.projections.key_vector",
    "linear_proj": "attention.projections.value_proj",
}
PYG = {
    "gat_net.": "",
    "scoring_fn_target": "att_dst",
    "scoring_fn_source": "att_src",
    "linear_proj": "lin",
}


def to_attnkit(state: Mapping[str, Tensor]) -> attnkit.GAT:
    """attnkit's network of these weights; a tensor too many or too few is an error."""
    first, last = (state[f"gat_net.{layer}.linear_proj.weight"] for layer in (0, 1))
    heads, out_heads = (state[f"gat_net.{layer}.scoring_fn_target"].shape[1] for layer in (0, 1))
    hidden, in_channels = first.shape
    num_classes = len(last) // out_heads
    model = attnkit.GAT(in_channels, hidden, num_classes, heads=heads, out_heads=out_heads)
    ours = renamed(state, OURS)
    ours = {name: t[0] if name.endswith("_vector") else t for name, t in ours.items()}
    model.load_state_dict(ours)
    return model.eval()


def to_pyg(state: Mapping[str, Tensor]) -> nn.ModuleList:
    """Return the network of a state dict as two layers of PyG."""
    layers = nn.ModuleList()
    for layer, concat in enumerate((True, False)):
        _, heads, channels = state[f"gat_net.{layer}.scoring_fn_target"].shape
        in_channels = state[f"gat_net.{layer}.linear_proj.weight"].shape[1]
        layers.append(GATConv(in_channels, channels, heads, concat))
    layers.load_state_dict(renamed(state, PYG))
    return layers.eval()


@torch.no_grad()
def logits_of(state: Mapping[str, Tensor], x: Tensor, edges: Tensor) -> dict[str, Tensor]:
    """Return the logits of every node by the name of the network, [nodes, classes]."""
    layers = to_pyg(state)
    carried = [from_pyg(layer) for layer in layers]

    def stacked(first: Callable[..., Tensor], last: Callable[..., Tensor]) -> Tensor:
        return last(F.elu(first(x, edges)), edges)

    return {
        "attnkit.GAT": to_attnkit(state)(x, edges),
        "PyG's GATConv": stacked(*layers),
        "GATConv by from_pyg": stacked(*carried),
    }


def main(checkpoint: Path, root: Path, save: Path | None) -> None:
    given = torch.load(checkpoint, weights_only=True, map_location="cpu")
    state = given["state_dict"]
    data = PlanetoidData(root)
    data.setup()
    graph = data.graph
    logits = logits_of(state, graph.x.to_dense(), graph.edge_index)
    rows = []
    for name, of_nodes in logits.items():
        right = (of_nodes.argmax(1) == graph.y).double()
        splits = {split: right[graph[f"{split}_mask"]] for split in ("train", "val", "test")}
        difference = (of_nodes - logits["attnkit.GAT"]).abs().max()
        rows.append(
            {"network": name}
            | {split: f"{100 * values.mean():.1f} %" for split, values in splits.items()}
            | {"largest difference": f"{difference:.1e}"}
        )
    print(table(rows))
    print(f"\nthe author's test accuracy: {100 * given['test_acc']:.1f} %")
    if save is not None:
        torch.save(to_attnkit(state).state_dict(), save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("root", type=Path)
    parser.add_argument("--save", type=Path)
    main(**vars(parser.parse_args()))
