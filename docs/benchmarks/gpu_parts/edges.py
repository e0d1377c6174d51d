"""Attention over edges against PyG's layers with the same weights, forward + backward.

Random graphs of 20 edges a target on average, whose degrees follow a power law. Per layer: the
whole layer against PyG's, whose output it must equal; its peak memory beyond the inputs; and
attention alone, as a share of the speed at which the device copies memory, where each edge reads
the rows of its nodes once in each of three passes (forward, gradients of the targets, of the
sources). Rows that the cache still holds make the share larger; a share above 1 is possible.
The order of `Edges`, as of an `edge_index` that was seen, is known before the clock starts; "new
edges" are other `Edges` in each step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from measure import alternate
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

from attnkit import Additive, Edges, attend

HEADS, DEGREE, PASSES = 8, 20, 3
ROUNDS = 7


@dataclass
class Layer:
    """PyG's layer, and what we compute instead from its weights: query, key, value and score."""

    theirs: torch.nn.Module
    project: Callable[[Tensor], tuple[Tensor, Tensor, Tensor, object]]
    head_dim: int

    def ours(self, nodes: Tensor, mask: Edges) -> Tensor:
        query, key, value, score = self.project(nodes)
        output = attend(query, key, value, mask=mask, score=score)
        return output[0].transpose(0, 1).flatten(1)


def heads_of(tensor: Tensor) -> Tensor:
    """[nodes, heads · dim] as [1, heads, nodes, dim]."""
    return tensor.view(len(tensor), HEADS, -1).transpose(0, 1)[None]


def layers(dim: int) -> dict[str, Layer]:
    width = HEADS * dim
    transformer = TransformerConv(width, dim, HEADS, root_weight=False)
    gatv2 = GATv2Conv(width, dim, HEADS, add_self_loops=False, bias=False)
    gat = GATConv(width, dim, HEADS, add_self_loops=False, bias=False)

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
        "TransformerConv": Layer(transformer, of_transformer, dim),
        "GATv2Conv": Layer(gatv2, of_gatv2, dim),
        "GATConv": Layer(gat, of_gat, 1),
    }


def power_law_graph(num_edges: int, device: str) -> tuple[Tensor, int]:
    """edge_index, and the number of nodes; the density of a target falls as its rank^−½."""
    num_nodes = max(2, num_edges // DEGREE)
    source = torch.randint(num_nodes, (num_edges,), device=device)
    target = (torch.rand(num_edges, device=device).square() * num_nodes).long()
    return torch.stack([source, target]), num_nodes


def step(function: Callable[[Tensor], Tensor], nodes: Tensor) -> Callable[[], object]:
    gradient = torch.randn_like(function(nodes))
    return lambda: torch.autograd.grad(function(nodes), nodes, gradient)


def alone(layer: Layer, nodes: Tensor, mask: Edges) -> Callable[[], object]:
    """Attention without the projections before it."""
    *inputs, score = layer.project(nodes)
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    gradient = torch.randn_like(inputs[2])
    return lambda: torch.autograd.grad(attend(*inputs, mask=mask, score=score), inputs, gradient)


def peak(program: Callable[[], object], device: str) -> str:
    if device == "cpu":
        return "–"
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    program()
    return f"{(torch.cuda.max_memory_allocated() - before) / 1e6:,.0f}"


def copy_bandwidth(device: str, synchronize: Callable[[], None]) -> float:
    """Bytes a second, read and written."""
    size = 2**28 if device == "cuda" else 2**20
    source, target = (torch.rand(size, device=device) for _ in range(2))
    copy = {"copy": lambda: target.copy_(source)}
    return 8 * size / alternate(copy, 20, synchronize=synchronize).median("copy")


def rows(device: str, _) -> Iterator[dict]:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    bandwidth = copy_bandwidth(device, synchronize)
    yield {"copying, read + written": f"{bandwidth / 1e9:,.0f} GB/s"}
    many = 10**7 if device == "cuda" else 10**3
    for num_edges, dim, dtype in (
        (many, 16, torch.float32),
        (many, 16, torch.bfloat16),
        (many // 4, 64, torch.float32),
        (many, 64, torch.bfloat16),
    ):
        index, num_nodes = power_law_graph(num_edges, device)
        mask = Edges(index, num_nodes)
        for name, layer in layers(dim).items():
            yield row(name, layer, dim, dtype, index, mask, bandwidth, device)


def row(name, layer, dim, dtype, index, mask, bandwidth, device) -> dict:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    num_edges = index.shape[1]
    layer.theirs.to(device, torch.float32)
    few = Edges(index[:, : num_edges // 100], mask.num_nodes)
    nodes = torch.randn(mask.num_nodes, HEADS * dim, device=device)
    with torch.no_grad():  # in float32, on few of the edges, so that PyG has the memory
        expected = layer.theirs(nodes, few.edge_index)
        torch.testing.assert_close(layer.ours(nodes, few), expected, atol=1e-3, rtol=1e-3)
    layer.theirs.to(dtype)
    nodes = nodes.to(dtype).requires_grad_()
    found = {
        "layer": f"{name}, {HEADS} × {dim}",
        "dtype": str(dtype).removeprefix("torch."),
        "edges": f"{num_edges:.1e}",
    }
    programs = {"attnkit": step(lambda x: layer.ours(x, mask), nodes)}
    programs["new edges"] = step(lambda x: layer.ours(x, Edges(index, mask.num_nodes)), nodes)
    programs["alone"] = alone(layer, nodes, mask)
    ours = peak(programs["attnkit"], device)
    try:
        programs["PyG"] = step(lambda x: layer.theirs(x, index), nodes)
        theirs = peak(programs["PyG"], device)
    except torch.OutOfMemoryError:
        programs.pop("PyG", None)
        theirs = "out of memory"
        torch.cuda.empty_cache()
    times = alternate(programs, ROUNDS, synchronize=synchronize)
    read = PASSES * num_edges * HEADS * (layer.head_dim + dim) * nodes.element_size()
    has_theirs = "PyG" in programs
    return found | {
        "PyG, ms": f"{1e3 * times.median('PyG'):,.1f}" if has_theirs else "–",
        "attnkit, ms": f"{1e3 * times.median('attnkit'):,.1f}",
        "faster": f"{times.ratio('PyG', 'attnkit'):.1f} ×" if has_theirs else "–",
        "new edges, ms": f"{1e3 * times.median('new edges'):,.1f}",
        "PyG's peak, MB": theirs,
        "ours, MB": ours,
        "alone, ms": f"{1e3 * times.median('alone'):,.1f}",
        "share of copying": f"{read / bandwidth / times.median('alone'):.2f}",
    }
