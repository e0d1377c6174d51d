"""Attention over edges within torch.compile(fullgraph=True)."""

import pytest
import torch
from edge_graphs import given, graphs, results

import attnkit
from attnkit import EdgeFeatures, Edges, GraphAttention
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
    """Self-loops, whose number is not known before; features, a bias, and not by inductor the
    weights."""
    edge_dim = None if score == "cosine" else 3

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = GraphAttention(
                CHANNELS, 4, 2, score=score, add_self_loops=True, edge_dim=edge_dim
            )

        def forward(self, x, edge_index, attr, bias):
            if backend == "inductor":
                return self.layer(x, edge_index, attr, edge_bias=bias)
            output, (_, weights) = self.layer(
                x, edge_index, attr, edge_bias=bias, return_attention_weights=True
            )
            return torch.cat([output.flatten(), weights.flatten()])

    def calls():
        for num_edges in (300, 301, 700):
            attr = torch.randn(num_edges, edge_dim) if edge_dim else None
            yield torch.randn(NODES, CHANNELS), graph(num_edges), attr, torch.randn(num_edges, 2)

    agrees(Layer(), calls(), backend)


def test_dropout_and_forbidden_edges():
    """Dropped again in the backward; a bias of −∞ forbids as it does uncompiled."""
    inputs, make_score = given("gatv2")
    bias = torch.zeros(1, graphs()["complete"].num_edges).double()
    bias[0, graphs()["complete"].edge_index[1] == 4] = -torch.inf
    options = {"mask": graphs()["complete"], "edge_features": EdgeFeatures(bias=bias)}

    def run(*inputs, dropout_p=0.0):
        score = make_score(inputs)
        return attnkit.attend(*inputs[:3], score=score, dropout_p=dropout_p, **options)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    output, *gradients = results(compiled(*inputs), inputs)
    assert (output[:, :, 4] == 0).all()
    torch.testing.assert_close([output, *gradients], results(run(*inputs), inputs))
    # linear in the values, by the same weights
    dropped = compiled(*inputs, dropout_p=0.5)
    (gradient,) = torch.autograd.grad(dropped.sum(), inputs[2])
    torch.testing.assert_close((gradient * inputs[2]).sum(), dropped.sum())
    assert not torch.allclose(dropped, output)


def test_keeps_the_rules_of_operators():
    edges = Edges(graph(300), NODES).adjacency
    _ = edges.by_source, edges.source_offsets
    tensors = [torch.rand(3, NODES, 8, requires_grad=True) for _ in range(3)]
    edge_query = torch.rand(3, NODES, 8, requires_grad=True)
    features, bias = torch.rand(300, 8).requires_grad_(), torch.rand(3, 300).requires_grad_()
    carried = (None, edge_query, None, features, bias)
    problem = EdgeProblem(edges, 0.5, None, True, 0.0, None, *tensors, *carried)
    torch.library.opcheck(
        edge_softmax,
        problem.flat(),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
    )
