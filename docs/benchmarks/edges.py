"""Attention over the edges of a graph against PyG's layers, forward + backward.

    python docs/benchmarks/edges.py [layers] [wide] [small] [features] [inference] [molecules] \
        [memory] [typed] [scaling] [--busy 1]

- layers: 50,000 nodes, 1,000,000 random edges, 128 channels in, 8 heads × 16, each of PyG's
  `TransformerConv`, `GATv2Conv` and `GATConv` against the layer that `attnkit.interop.from_pyg`
  makes of it, which has the same weights and gives the same output. Both are called as PyG's
  documentation shows, with a tensor `edge_index`, the same in every step; ours also with `Edges`,
  and both with a tensor that is new in every step, which ours sorts. `GATConv` also with the
  self-loops that it adds by default;
- wide: the same with 8 heads × 64;
- small: 2,708 nodes, 10,556 edges, 64 channels in, 8 heads × 8, the sizes of Cora's second layer;
- features: as layers, with edge features of 16 channels;
- inference: as layers, without gradients;
- molecules: 200 graphs of 30 nodes and 60 edges as one tensor, new in every step;
- memory: the peak memory of a step of each beyond what stood before it, in a process of its own;
  the same tensor as in the step before, and a new one;
- typed: PyG's `HGTConv` and `HANConv`, 50,000 nodes of three types, 1,000,000 edges of four, 128
  channels in, 8 heads × 16; and `RGATConv`, which makes a matrix for each edge, with 10,000 nodes,
  50,000 edges of ten relations, 32 channels in, 4 heads × 8; with the peak memory;
- scaling: 10⁵, 10⁶ and 10⁷ edges, 20 a node, 8 heads × 16, the kernel alone, against what moving
  its tables through memory would take at the speed at which this machine copies.

With --busy so many other processes keep a core each busy. Programs alternate; a ratio is the median
of the rounds' ratios. The typed layers are given edges that are sorted already. New pages are a
large part of PyG's time: environment variables of the memory allocator change these figures.
"""

import argparse
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from measure import alternate, busy, machine, peak_memory, table

import attnkit
from attnkit import interop

HEADS = 8
LAYERS = ("TransformerConv", "GATv2Conv", "GATConv")
CALLS = ("edge_index", "Edges", "new edge_index")
TYPED = ("HGTConv", "HANConv", "RGATConv")
NODES = {"paper": 25_000, "author": 20_000, "venue": 5_000}
EDGES = {
    ("paper", "cites", "paper"): 400_000,
    ("author", "writes", "paper"): 250_000,
    ("paper", "written_by", "author"): 250_000,
    ("venue", "prints", "paper"): 100_000,
}
Step = Callable[[], None]


def graph(num_nodes: int, num_edges: int, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(num_nodes, channels), torch.randint(num_nodes, (2, num_edges))


def steps(
    name: str,
    sizes: tuple[int, int, int],
    head_dim: int,
    *,
    calls: Sequence[str] = CALLS[:1],
    edge_dim: int | None = None,
    trains: bool = True,
    graphs: int | None = None,
    self_loops: bool = False,
    compare: bool = True,
) -> dict[str, tuple[Step, Step]]:
    """Steps of PyG's layer and of ours, of equal weights, by what both are given: one of `CALLS`,
    where PyG's is always given a tensor."""
    from torch_geometric import nn

    x, edge_index = graph(*sizes)
    if graphs is not None:  # edges stay within a graph
        size, of_graph = sizes[0] // graphs, torch.arange(sizes[1]) % graphs
        edge_index = edge_index % size + of_graph * size
    options = {} if name == "TransformerConv" else {"add_self_loops": self_loops}
    theirs = getattr(nn, name)(sizes[2], head_dim, heads=HEADS, edge_dim=edge_dim, **options)
    ours = interop.from_pyg(theirs)
    edges = attnkit.Edges(edge_index, sizes[0])
    carried = [] if edge_dim is None else [torch.randn(sizes[1], edge_dim)]
    if compare:
        expected = theirs(x, edge_index, *carried)
        torch.testing.assert_close(ours(x, edges, *carried), expected, atol=1e-4, rtol=1e-4)

    def step(layer, given: Callable[[], object]) -> Step:
        def run() -> None:
            with torch.set_grad_enabled(trains):
                output = layer(x, given(), *carried)
            if trains:
                output.square().mean().backward()
                layer.zero_grad()

        return run

    given = {
        "edge_index": (lambda: edge_index, lambda: edge_index),
        "Edges": (lambda: edge_index, lambda: edges),
        "new edge_index": (edge_index.clone, edge_index.clone),
    }
    return {call: (step(theirs, given[call][0]), step(ours, given[call][1])) for call in calls}


def typed_steps(name: str):
    """Return the steps of `steps` for a layer on typed graphs."""
    from torch_geometric import nn

    torch.manual_seed(0)
    if name == "RGATConv":
        theirs = nn.RGATConv(32, 8, num_relations=10, heads=4)
        edge_index, edge_type = torch.randint(10_000, (2, 50_000)), torch.randint(10, (50_000,))
        nodes, given = torch.randn(10_000, 32), (edge_index, edge_type)
        prepared = attnkit.TypedEdges(edge_index, 10_000, edge_type, 10)
    else:
        metadata = [*NODES], [*EDGES]
        theirs = getattr(nn, name)(128, HEADS * 16, metadata, heads=HEADS)
        nodes = {kind: torch.randn(number, 128) for kind, number in NODES.items()}
        given = (
            {
                key: torch.stack([torch.randint(NODES[end], (number,)) for end in key[::2]])
                for key, number in EDGES.items()
            },
        )
        prepared = attnkit.TypedEdges(given[0], NODES)
    ours = interop.from_pyg(theirs)

    def outputs(layer, *edges):
        found = layer(nodes, *edges)
        found = [*found.values()] if isinstance(found, dict) else [found]
        return [output for output in found if output is not None]

    for mine, their in zip(outputs(ours, prepared), outputs(theirs, *given), strict=True):
        torch.testing.assert_close(mine, their, atol=1e-4, rtol=1e-4)

    def step(layer, *edges):
        def run():
            sum(output.square().mean() for output in outputs(layer, *edges)).backward()
            layer.zero_grad()

        return run

    return step(theirs, *given), step(ours, prepared)


def layers(
    sizes: tuple[int, int, int],
    head_dim: int,
    rounds: int,
    *,
    of: Sequence[str] = LAYERS,
    **options: Any,
) -> None:
    rows = []
    added = " with self-loops" if options.get("self_loops") else ""
    for name in of:
        for call, both in steps(name, sizes, head_dim, **options).items():
            row = {"layer": f"{name}{added}, {HEADS} × {head_dim}", "given": call}
            rows.append(row | compared(*both, rounds))
    print(table(rows))


def typed(rounds: int) -> None:
    rows = []
    for name in TYPED:
        row = {"layer": name} | compared(*typed_steps(name), rounds)
        rows.append(row | peaks_of(name))
    print(table(rows))


def compared(pyg, ours, rounds: int) -> dict[str, str]:
    """Median times of two steps, and the median, least and largest of their ratios."""
    times = alternate({"PyG": pyg, "attnkit": ours}, rounds)
    ratios = [a / b for a, b in zip(times.seconds["PyG"], times.seconds["attnkit"], strict=True)]
    return {
        "attnkit": f"{1e3 * times.median('attnkit'):.1f} ms",
        "PyG": f"{1e3 * times.median('PyG'):.1f} ms",
        "ratio": f"{times.ratio('PyG', 'attnkit'):.1f} × ({min(ratios):.1f}–{max(ratios):.1f})",
    }


def prepare() -> None:
    _, edge_index = graph(50_000, 1_000_000, 1)
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        adjacency = attnkit.Edges(edge_index, 50_000).adjacency
        _ = adjacency.by_source, adjacency.source_offsets, adjacency.target_by_source
        taken.append(time.perf_counter() - start)
    print(f"preparing 1,000,000 edges, once: {1e3 * sorted(taken)[2]:.0f} ms\n")


def memory(head_dims: tuple[int, ...]) -> None:
    rows = []
    for head_dim in head_dims:
        for name in LAYERS:
            rows.append({"layer": f"{name}, {HEADS} × {head_dim}"} | peaks_of(name, head_dim))
    print(table(rows))


def peaks_of(name: str, head_dim: int = 16) -> dict[str, str]:
    """The peak memory of a step of each, and the share of PyG's that ours is."""
    peaks = {}
    news = [] if name in TYPED else ["attnkit, new edge_index"]
    for who in ("PyG", "attnkit", *news):
        command = [sys.executable, __file__, "--peak", name, who, str(head_dim)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[who] = float(done.stdout.split()[-1])
    named = {f"{who}, memory": f"{peak / 2**20:.0f} MiB" for who, peak in peaks.items()}
    return named | {"share": f"1/{peaks['PyG'] / peaks['attnkit']:.1f}"}


def peak(name: str, who: str, head_dim: int) -> None:
    """Print the peak memory of the third step: those before have made gradients, and sorted the
    edges unless they are new in each."""
    call = CALLS[2] if who.endswith(CALLS[2]) else CALLS[0]
    # of one program alone: memory that the other gave back would be taken again in pieces
    if name in TYPED:
        pyg, ours = typed_steps(name)
    else:
        pyg, ours = steps(name, LARGE, head_dim, calls=[call], compare=False)[call]
    step = pyg if who == "PyG" else ours
    step()
    print(peak_memory(step))


def scaling(rounds: int) -> None:
    speed = copy_speed()
    print(f"copying: {speed / 1e9:.1f} GB/s read and written\n")
    rows = []
    for num_edges in (10**5, 10**6, 10**7):
        num_nodes = num_edges // 20
        torch.manual_seed(0)
        tables = [torch.randn(HEADS, num_nodes, 16, requires_grad=True) for _ in range(3)]
        edges = attnkit.Edges(torch.randint(num_nodes, (2, num_edges)), num_nodes)
        towards = torch.randn(HEADS, num_nodes, 16)

        def step(tables=tables, edges=edges, towards=towards):
            torch.autograd.grad(attnkit.attend(*tables, mask=edges), tables, towards)

        times = alternate({"attnkit": step}, rounds)
        # bytes: rows of 16 that edges read, 2 forward (k, v) and 4 backward (v, k, g, q), and the
        # weights, indices and slopes of edges, each once
        moved = HEADS * num_edges * (6 * 16 * 4 + 14 * 4)
        bound = moved / speed
        rows.append(
            {
                "edges": f"{num_edges:,}",
                "time": f"{1e3 * times.median('attnkit'):.0f} ms",
                "a million edges": f"{1e9 * times.median('attnkit') / num_edges:.0f} ms",
                "bound": f"{1e3 * bound:.0f} ms",
                "time / bound": f"{times.median('attnkit') / bound:.2f}",
            }
        )
    print(table(rows))


def copy_speed() -> float:
    """Bytes read and written a second, copying 256 MB."""
    source, target = torch.randn(2, 2**25)
    times = alternate({"copy": lambda: target.copy_(source)}, 7)
    return 2 * source.nbytes / times.median("copy")


LARGE = (50_000, 1_000_000, 128)
PARTS = (
    *("layers", "wide", "small", "features", "inference", "molecules"),
    *("memory", "typed", "scaling"),
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument(
        "--peak", nargs=3, metavar=("LAYER", "WHO", "HEAD_DIM"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    parts = arguments.parts or PARTS
    if arguments.peak:
        peak(arguments.peak[0], arguments.peak[1], int(arguments.peak[2]))
        sys.exit()
    allocator = ("OMP", "MALLOC", "THP")
    settings = {name: value for name, value in os.environ.items() if name.startswith(allocator)}
    print(f"{machine()}\n{settings}\n")
    rounds = arguments.rounds
    with busy(arguments.busy):
        prepare()
        if "layers" in parts:
            layers(LARGE, 16, rounds, calls=CALLS)
            layers(LARGE, 16, rounds, of=["GATConv"], self_loops=True)
        if "wide" in parts:
            layers(LARGE, 64, min(3, rounds))
        if "small" in parts:
            layers((2_708, 10_556, 64), 8, 20 * rounds)
        if "features" in parts:
            layers(LARGE, 16, min(3, rounds), edge_dim=16)
        if "inference" in parts:
            layers(LARGE, 16, rounds, trains=False)
        if "molecules" in parts:
            layers((6_000, 12_000, 64), 8, 5 * rounds, graphs=200, calls=CALLS[2:])
        if "memory" in parts:
            memory((16, 64))
        if "typed" in parts:
            typed(rounds)
        if "scaling" in parts:
            scaling(rounds)
