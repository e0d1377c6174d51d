"""Graph transformers that see far, a training step on one random graph: seconds and peak memory.

    python docs/benchmarks/far.py [--nodes 100000] [--degree 10] [--rounds 5] [--only NAME]

Two blocks of 64 channels and a gradient for every parameter; edges sorted once. `local` is the
graph transformer along edges alone, `softmax` with attention of all nodes to all, `linear` with
linear attention, `exphormer` with 6 expander edges a node and one virtual node; SGFormer has one
layer of global attention and two convolutions, Polynormer two local layers and a global one. PyG's
SGFormer and Polynormer are of the same sizes. Memory is measured in a process for each.
"""

import argparse
import subprocess
import sys

import torch
from measure import alternate, machine, peak_memory, table
from torch_geometric.nn import models as pyg

import attnkit

CHANNELS, CLASSES, HEADS = 64, 10, 4
SOFTMAX_NODES = 20_000  # beyond them a step of softmax takes minutes


def models() -> dict[str, object]:
    """Return the constructors of the models by name."""
    size = CHANNELS, CHANNELS, CLASSES

    def transformer(**options):
        return attnkit.GraphTransformer(*size, num_layers=2, heads=HEADS, **options)

    return {
        "local": lambda: transformer(global_attention=None),
        "softmax": lambda: transformer(global_attention="softmax"),
        "linear": lambda: transformer(global_attention="linear"),
        "exphormer": lambda: transformer(
            global_attention=None, expander_degree=6, num_virtual_nodes=1
        ),
        "SGFormer": lambda: attnkit.SGFormer(*size),
        "SGFormer of PyG": lambda: pyg.SGFormer(*size, trans_num_layers=1, gnn_num_layers=2),
        "Polynormer": lambda: attnkit.Polynormer(*size, num_local_layers=2, num_global_layers=1),
        "Polynormer of PyG": lambda: global_polynormer(*size),
    }


def global_polynormer(*size):
    """PyG's, with the global layer that it leaves out until it is told."""
    model = pyg.Polynormer(*size, local_layers=2, global_layers=1, local_attn=True)
    model._global = True
    return model


def step(name: str, nodes: int, degree: int):
    """A training step of a model on a random graph."""
    torch.manual_seed(0)
    model = models()[name]()
    x = torch.randn(nodes, CHANNELS)
    edge_index = torch.randint(0, nodes, (2, nodes * degree))
    labels = torch.randint(0, CLASSES, (nodes,))
    graph: tuple = (attnkit.Edges(edge_index, nodes),)
    if "PyG" in name:
        graph = edge_index, torch.zeros(nodes, dtype=torch.long)

    def run():
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x, *graph), labels).backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--degree", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only")
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    if args.memory:
        print(peak_memory(step(args.only, args.nodes, args.degree)))
        return
    names = [args.only] if args.only else list(models())
    if args.nodes > SOFTMAX_NODES and not args.only:
        names.remove("softmax")
    programs = {name: step(name, args.nodes, args.degree) for name in names}
    times = alternate(programs, args.rounds, warm_up=1)
    print(machine(), f"{args.nodes:,} nodes, {args.nodes * args.degree:,} edges")
    rows = []
    for name in names:
        command = [sys.executable, __file__, "--memory", "--only", name]
        command += ["--nodes", str(args.nodes), "--degree", str(args.degree)]
        memory = int(subprocess.run(command, capture_output=True, check=True).stdout)
        found = f"{times.median(name):.2f} s", f"{memory / 2**20:,.0f} MiB"
        rows.append({"model": name, "step": found[0], "peak memory": found[1]})
    print(table(rows))


if __name__ == "__main__":
    main()
