"""GATv2 on a graph of a million nodes: sampling, training from a mapped file, all nodes by layers.

    python docs/benchmarks/sampling.py [--part sampler|epoch|inference] [--nodes 1000000]
        [--edges 20000000] [--seeds 100000] [--workers 1] [--folder FOLDER]

The graph is made up and written to files: sources and targets are drawn with probabilities that
fall as rank^-0.6, 64 random features in an .npy, which is mapped. Each part prints its table:

- sampler: batches of 1,024 seeds with fan-out 15 and 10 and their features, processor time of one
  thread: attnkit's and PyG's `NeighborLoader` (with pyg-lib or torch-sparse, where one is
  installed), alternating.
- epoch: one over all seeds: GATv2 of two layers, 64 channels in 8 heads, Adam, batch 1,024.
- inference: the logits of all nodes, layer by layer and at once.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from measure import alternate, begin_peak, machine, resident, table
from torch_geometric.data import Data
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

import attnkit
from attnkit.tasks.graphs import GraphFilesData, NodeClassification
from attnkit.tasks.graphs.sampling import InNeighbors, layerwise

FAN_OUT, BATCH, CHANNELS, CLASSES = [15, 10], 1024, 64, 10


def write_graph(folder: Path, nodes: int, edges: int, seeds: int) -> None:
    """The files of `data=graph_files`."""
    random = np.random.default_rng(0)
    order = random.permutation(nodes)

    def drawn() -> np.ndarray:
        ranks = nodes * random.random(edges) ** (1 / (1 - 0.6))
        return order[np.minimum(ranks.astype(np.int64), nodes - 1)]

    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "edges.npy", np.stack([drawn(), drawn()]))
    shape = (nodes, CHANNELS)
    x = np.lib.format.open_memmap(folder / "features.npy", "w+", np.float32, shape)
    for start in range(0, nodes, 2**16):
        x[start : start + 2**16] = random.standard_normal((min(2**16, nodes - start), CHANNELS))
    x.flush()
    np.save(folder / "labels.npy", random.integers(0, CLASSES, nodes))
    split = random.permutation(nodes)
    ends = {"train": seeds, "val": seeds + nodes // 100, "test": seeds + nodes // 50}
    starts = (0, ends["train"], ends["val"])
    for (name, end), start in zip(ends.items(), starts, strict=True):
        np.save(folder / f"{name}.npy", split[start:end])


def megabytes() -> str:
    """The process's own memory, and its peak with the pages of mapped files."""
    return f"{resident('RssAnon') / 1e6:,.0f} MB, peak {resident('VmHWM') / 1e6:,.0f} MB"


def sampler(data: GraphFilesData, rounds: int) -> None:
    """Batches of both, features gathered."""
    torch.set_num_threads(1)
    data.trainer = None
    programs = {"attnkit": iter(data.train_dataloader())}
    if WITH_PYG_LIB or WITH_TORCH_SPARSE:
        from torch_geometric.loader import NeighborLoader

        graph = Data(x=data.graph.x, y=data.graph.y, edge_index=data.graph.edge_index)
        start = time.perf_counter()
        theirs = NeighborLoader(
            graph, FAN_OUT, data.graph.train_mask, batch_size=BATCH, shuffle=True
        )
        print(f"NeighborLoader made in {time.perf_counter() - start:.1f} s")
        programs["PyG"] = iter(theirs)
    else:
        print("PyG's NeighborLoader needs pyg-lib or torch-sparse, and neither is installed")
    times = alternate(
        {name: lambda it=it: next(it) for name, it in programs.items()},
        rounds,
        clock=time.process_time,
    )
    rows = [
        {
            "sampler": name,
            "median of a batch": f"{1000 * times.median(name):.0f} ms",
            "seeds/s": f"{BATCH / times.median(name):,.0f}",
            "to PyG's": f"{times.ratio(name, 'PyG'):.2f}" if "PyG" in programs else "",
        }
        for name in programs
    ]
    print(table(rows))


def network() -> attnkit.GAT:
    return attnkit.GAT(CHANNELS, 64, CLASSES, score="gatv2", dropout_p=0.1, attention_dropout_p=0.0)


def epoch(data: GraphFilesData) -> None:
    """The training of a Trainer, without a Trainer."""
    task = NodeClassification(network(), num_classes=CLASSES)
    task.log = lambda *_, **__: None
    optimizer = torch.optim.Adam(task.parameters())
    loader = data.train_dataloader()
    start, waited, seen = time.perf_counter(), 0.0, 0
    batches = iter(loader)
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        task.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += batch.batch_size
    seconds = time.perf_counter() - start
    row = {
        "workers": str(data.num_workers),
        "seconds": f"{seconds:.1f}",
        "seeds/s": f"{seen / seconds:,.0f}",
        "waited for batches": f"{waited:.1f} s",
        "memory": megabytes(),
    }
    print(table([row]))


def inference(data: GraphFilesData) -> None:
    """Time the logits of all nodes, computed layer by layer and at once."""
    model, graph = network().eval(), data.graph
    neighbors = InNeighbors.of(graph.edge_index, graph.num_nodes)
    rows, found = [], []
    edges = attnkit.Edges(graph.edge_index, graph.num_nodes)
    programs = {
        "layer by layer": lambda: layerwise(
            model.hops, graph.x, neighbors, torch.arange(graph.num_nodes)
        ),
        "at once": lambda: model(graph.x, edges),
    }
    for name, program in programs.items():
        begin_peak()
        before, start = resident("VmRSS"), time.perf_counter()
        with torch.no_grad():
            found.append(program())
        row = {
            "inference": name,
            "seconds": f"{time.perf_counter() - start:.1f}",
            "peak beyond the graph": f"{(resident('VmHWM') - before) / 1e6:,.0f} MB",
        }
        rows.append(row)
    print(table(rows))
    print(f"largest difference: {float((found[0] - found[1]).abs().max()):.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", choices=("sampler", "epoch", "inference"), default="sampler")
    parser.add_argument("--nodes", type=int, default=10**6)
    parser.add_argument("--edges", type=int, default=2 * 10**7)
    parser.add_argument("--seeds", type=int, default=10**5)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="of the graph, kept; made if it is not there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "edges.npy").exists():
            write_graph(folder, options.nodes, options.edges, options.seeds)
        print(machine())
        start = time.perf_counter()
        data = GraphFilesData(
            folder, batch_size=BATCH, num_neighbors=FAN_OUT, num_workers=options.workers
        )
        data.setup()
        print(f"read in {time.perf_counter() - start:.1f} s; {megabytes()}")
        if options.part == "sampler":
            sampler(data, options.rounds)
        else:
            {"epoch": epoch, "inference": inference}[options.part](data)
