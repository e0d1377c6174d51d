"""Attention over edges against PyG's layers with the same weights, forward + backward.

    python docs/benchmarks/edges_gpu.py                             10⁷ edges, on CUDA
    python docs/benchmarks/edges_gpu.py --device cpu --edges 10000  to see that it runs

Random graphs whose targets' degrees follow a power law. Per layer: the whole layer against PyG's,
whose output it must equal; its peak memory beyond the inputs; and attention alone, as a share of
what the device could do if it read the rows of its edges' nodes as fast as it copies memory. Rows
that the cache still holds make it more than that, so that a share above 1 is no mistake.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from measure import alternate, machine, table
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

from attnkit import Additive, Edges, attend

HEADS, DIM, DEGREE = 8, 16, 20
PASSES = 3  # over the edges: forward, the gradients of targets, those of sources


@dataclass
class Layer:
    """PyG's layer, and what we compute instead from its weights: query, key, value and score."""

    theirs: torch.nn.Module
    project: Callable[[Tensor], tuple[Tensor, Tensor, Tensor, object]]
    head_dim: int = DIM

    def ours(self, nodes: Tensor, mask: Edges) -> Tensor:
        query, key, value, score = self.project(nodes)
        output = attend(query, key, value, mask=mask, score=score, backend="edges_triton")
        return output[0].transpose(0, 1).flatten(1)


def heads_of(tensor: Tensor) -> Tensor:
    """[nodes, heads · dim] as [1, heads, nodes, dim]."""
    return tensor.view(len(tensor), HEADS, -1).transpose(0, 1)[None]


def layers() -> dict[str, Layer]:
    width = HEADS * DIM
    transformer = TransformerConv(width, DIM, HEADS, root_weight=False)
    gatv2 = GATv2Conv(width, DIM, HEADS, add_self_loops=False, bias=False)
    gat = GATConv(width, DIM, HEADS, add_self_loops=False, bias=False)

    def of_transformer(nodes):
        projections = (transformer.lin_query, transformer.lin_key, transformer.lin_value)
        return *(heads_of(project(nodes)) for project in projections), "scaled_dot"

    def of_gatv2(nodes):
        source = heads_of(gatv2.lin_l(nodes))
        return heads_of(gatv2.lin_r(nodes)), source, source, Additive(gatv2.att[0], "leaky_relu")

    def of_gat(nodes):
        value = heads_of(gat.lin(nodes))
        target, source = (value @ vector[0, :, :, None] for vector in (gat.att_dst, gat.att_src))
        return target, source, value, Additive(value.new_ones(1), "leaky_relu")

    return {
        "TransformerConv": Layer(transformer, of_transformer),
        "GATv2Conv": Layer(gatv2, of_gatv2),
        "GATConv": Layer(gat, of_gat, head_dim=1),
    }


def power_law_graph(num_edges: int, device: str) -> tuple[Tensor, int]:
    """edge_index, and the number of nodes; the density of a target falls as its rank^−½."""
    num_nodes = max(2, num_edges // DEGREE)
    source = torch.randint(num_nodes, (num_edges,), device=device)
    target = (torch.rand(num_edges, device=device).square() * num_nodes).long()
    return torch.stack([source, target]), num_nodes


def step(function: Callable[[Tensor], Tensor], nodes: Tensor) -> Callable[[], Tensor]:
    gradient = torch.randn_like(function(nodes))

    def run():
        nodes.grad = None
        function(nodes).backward(gradient)
        return nodes.grad

    return run


def alone(layer: Layer, nodes: Tensor, mask: Edges) -> Callable[[], object]:
    """Attention without the projections before it."""
    *inputs, score = layer.project(nodes)
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    gradient = torch.randn_like(inputs[2])

    def run():
        output = attend(*inputs, mask=mask, score=score, backend="edges_triton")
        return torch.autograd.grad(output, inputs, gradient)

    return run


def peak(program: Callable[[], object]) -> str:
    if not torch.cuda.is_available():
        return "–"
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    program()
    return f"{(torch.cuda.max_memory_allocated() - before) / 1e6:,.0f} MB"


def copy_bandwidth(device: str, synchronize: Callable[[], None]) -> float:
    """Bytes a second, read and written."""
    size = 2**28 if device == "cuda" else 2**24
    source, target = (torch.zeros(size, device=device) for _ in range(2))
    copy = {"copy": lambda: target.copy_(source)}
    return 8 * size / alternate(copy, 20, synchronize=synchronize).median("copy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--edges", type=int, default=10**7)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    device = arguments.device
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(0)
    index, num_nodes = power_law_graph(arguments.edges, device)
    mask = Edges(index, num_nodes)
    bandwidth = copy_bandwidth(device, synchronize)
    print(torch.cuda.get_device_name() if device == "cuda" else machine())
    print(f"copies {bandwidth / 1e9:,.0f} GB/s; {arguments.edges:,} edges, {num_nodes:,} nodes")
    rows = []
    for name, layer in layers().items():
        layer.theirs.to(device)
        nodes = torch.randn(num_nodes, HEADS * DIM, device=device, requires_grad=True)
        with torch.no_grad():
            expected = layer.theirs(nodes, index)
            torch.testing.assert_close(layer.ours(nodes, mask), expected, atol=1e-4, rtol=1e-4)
        programs = {
            "PyG": step(lambda x, layer=layer: layer.theirs(x, index), nodes),
            "attnkit": step(lambda x, layer=layer: layer.ours(x, mask), nodes),
            "alone": alone(layer, nodes, mask),
        }
        times = alternate(programs, arguments.rounds, synchronize=synchronize)
        read = PASSES * arguments.edges * HEADS * (layer.head_dim + DIM) * nodes.element_size()
        rows.append(
            {
                "layer": name,
                **{who: f"{1e3 * times.median(who):,.1f} ms" for who in programs},
                "faster": f"{times.ratio('PyG', 'attnkit'):.1f} ×",
                "PyG's peak": peak(programs["PyG"]),
                "ours": peak(programs["attnkit"]),
                "share of copying": f"{read / bandwidth / times.median('alone'):.2f}",
            }
        )
    print(table(rows))


if __name__ == "__main__":
    main()
