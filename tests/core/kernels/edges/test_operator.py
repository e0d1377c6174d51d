"""Attention over edges within torch.compile(fullgraph=True)."""

import pytest
import torch

import attnkit
from attnkit import Edges, GraphAttention
from attnkit.core.kernels.edges.edges import edge_softmax
from attnkit.core.kernels.edges.problem import EdgeProblem

NODES, CHANNELS = 60, 8


def graph(num_edges):
    return torch.randint(NODES, (2, num_edges))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def agrees(layer, calls, backend="aot_eager"):
    """Compiled whole, the layer gives what it gives by itself, and the gradients."""
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    parameters = [*layer.parameters()]
    for call in calls:
        outputs = compiled(*call), layer(*call)
        torch.testing.assert_close(*outputs)
        mine, theirs = (torch.autograd.grad(y.square().sum(), parameters) for y in outputs)
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kept", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_graph_of_any_size(kept):
    layer = GraphAttention(CHANNELS, 4, heads=2, score="gatv2")

    def call(num_edges):
        x, edge_index = torch.randn(NODES, CHANNELS), graph(num_edges)
        if not kept:
            return x, edge_index
        edges = Edges(edge_index, NODES)
        layer(x, edges).sum().backward()
        return x, edges

    agrees(layer, map(call, (300, 301, 700)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("score", ["scaled_dot", "cosine", "additive", "gatv2", "gat"])
def test_all_that_edges_carry(score, backend):
    """Self-loops, whose number is not known before; features, and a bias; groups of heads."""
    has_features = score != "cosine"

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            edge_dim = 3 if has_features else None
            self.layer = GraphAttention(
                CHANNELS, 4, 2, score=score, add_self_loops=True, edge_dim=edge_dim
            )

        def forward(self, x, edge_index, attr, bias):
            return self.layer(x, edge_index, attr, edge_bias=bias)

    def calls():
        for num_edges in (300, 301, 700):
            attr = torch.randn(num_edges, 3) if has_features else None
            yield torch.randn(NODES, CHANNELS), graph(num_edges), attr, torch.randn(num_edges, 2)

    agrees(Layer(), calls(), backend)


@pytest.mark.slow
def test_models_and_what_they_give_besides():
    calls = [(torch.randn(NODES, CHANNELS), graph(300)) for _ in range(2)]
    agrees(attnkit.GAT(CHANNELS, 8, 4).eval(), calls)

    class Weights(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = GraphAttention(CHANNELS, 4, 2)

        def forward(self, x, edge_index):
            output, (_, weights) = self.layer(x, edge_index, return_attention_weights=True)
            return torch.cat([output.flatten(), weights.flatten()])

    agrees(Weights(), calls)


def test_dropout_is_the_same_in_the_backward():
    layer = GraphAttention(CHANNELS, 4, 2, dropout_p=0.5).double()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    edge_index = graph(200)  # so few that the same kernel computes them uncompiled
    x = torch.randn(NODES, CHANNELS, dtype=torch.float64, requires_grad=True)
    step = 1e-6 * torch.randn_like(x)

    def loss(x, model=compiled):
        torch.manual_seed(3)
        return model(x, edge_index).square().sum()

    torch.testing.assert_close(loss(x), loss(x))
    if not torch.__version__.startswith("2.11."):  # which draws other numbers when it compiles
        torch.testing.assert_close(loss(x), loss(x, layer))
    (gradient,) = torch.autograd.grad(loss(x), x)
    with torch.no_grad():
        difference = loss(x + step) - loss(x - step)
    torch.testing.assert_close(2 * (gradient * step).sum(), difference, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("num_lanes", "kept"), [(1, False), (3, True)])
def test_keeps_the_rules_of_operators(num_lanes, kept):
    edges = Edges(graph(300), NODES).adjacency
    rand = torch.rand
    tensors = [rand(num_lanes, NODES, 8, requires_grad=True) for _ in range(3)]
    if kept:
        _ = edges.by_source, edges.source_offsets
    edge_query = rand(num_lanes, NODES, 8, requires_grad=True)
    features, bias = rand(300, 8, requires_grad=True), rand(num_lanes, 300, requires_grad=True)
    carried = (None, edge_query, None, features, bias)
    problem = EdgeProblem(edges, 0.5, None, True, 0.0, None, *tensors, *carried)
    torch.library.opcheck(
        edge_softmax,
        problem.flat(),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
    )
