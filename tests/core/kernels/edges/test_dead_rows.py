"""A target all of whose edges have the bias −∞, the logarithm of a weight of 0, equals one that has
no edges: in every kernel that reads edges, by every score, and in what gives their weights."""

import pytest
import torch
from edge_graphs import graphs, rand, results
from support import with_third

import attnkit
from attnkit import EdgeFeatures, Edges, GraphAttention, attend, edge_weights
from attnkit.core.capture.watch import watch_attention
from attnkit.core.kernels.choose import BACKENDS
from attnkit.core.kernels.edges import scores

DEAD = {"one target": [4], "some targets": [0, 4, 8], "all targets": [*range(11)]}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}
SCORES = {
    "scaled_dot": lambda dtype: "scaled_dot",
    "gaussian": lambda dtype: "gaussian",
    "additive": lambda dtype: attnkit.Additive(vector(dtype)),
    "gatv2": lambda dtype: attnkit.Additive(vector(dtype), activation="leaky_relu"),
}


def vector(dtype):
    return rand(2, 8, seed=3, dtype=dtype).detach()


def given(dead, dtype):
    """Query, key and value; edges and their bias; and the same without the edges it forbids."""
    tensors = [rand(2, nodes, 8, seed=nodes + place, dtype=dtype)
               for place, nodes in enumerate((11, 13, 13))]  # fmt: skip
    edges = graphs()["hub"]
    is_dead = torch.isin(edges.edge_index[1], torch.tensor(DEAD[dead]))
    bias = rand(edges.num_edges, seed=5, dtype=dtype).detach()
    forbidden = EdgeFeatures(bias=bias.masked_fill(is_dead, -torch.inf)[None])
    left = Edges(edges.edge_index[:, ~is_dead], 11, 13)
    return tensors, (edges, forbidden), (left, EdgeFeatures(bias=bias[~is_dead][None])), is_dead


def attention(graph, score, backend="auto"):
    edges, carried = graph
    return lambda *tensors: attend(
        *tensors, mask=edges, edge_features=carried, score=score, backend=backend
    )


def exact(tensors, graph, score):
    """The definition in float64, with gradients."""
    tensors = [tensor.detach().double().requires_grad_() for tensor in tensors]
    graph = graph[0], graph[1].to(torch.float64)
    return results(attention(graph, score, "reference")(*tensors), tensors)


def assert_equal(actual, wanted, dtype):
    for ours, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=TOLERANCES[dtype], rtol=1e-4)


def averages(weights, edges, value):
    """The output by its definition, Σ_e weight_e · value_j."""
    source, target = edges.edge_index
    output = value.new_zeros(len(value), edges.sizes[0], value.shape[2])
    return output.index_add(1, target, weights[..., None] * value[:, source])


@pytest.mark.parametrize(
    ("dtype", "dead", "lanes_are"),
    with_third(TOLERANCES, DEAD, ["together", "in turn"]),
    ids=str,
)
@pytest.mark.parametrize("score", SCORES)
def test_equals_a_target_without_edges(dtype, score, dead, lanes_are, monkeypatch):
    if lanes_are == "in turn":
        monkeypatch.setattr(scores, "GROUP", 1)
    tensors, graph, left, is_dead = given(dead, dtype)
    wanted = exact(tensors, left, SCORES[score](torch.float64))
    score, (edges, carried) = SCORES[score](dtype), graph
    batch = (tensor[None] for tensor in tensors)
    reasons = attnkit.explain_backends(
        *batch, mask=edges, edge_features=carried, score=score
    ).reasons
    kernels = [kernel.name for kernel in BACKENDS if not reasons[kernel.name]]
    assert {"edges", "reference"} <= {*kernels}
    for kernel in kernels:
        found = results(attention(graph, score, kernel)(*tensors), tensors)
        assert (found[0][:, DEAD[dead]] == 0).all()
        assert_equal(found, wanted, dtype)
    query, key, value = tensors
    weights = edge_weights(query, key, edges, score=score, edge_features=carried)
    assert (weights[:, is_dead] == 0).all()
    assert_equal([averages(weights, edges, value)], wanted[:1], dtype)
    gradients = torch.autograd.grad(weights.square().sum(), (query, key))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_equals_it_when_compiled():
    torch._dynamo.reset()
    dtype, score = torch.float32, "gatv2"
    tensors, graph, left, _ = given("some targets", dtype)
    wanted = exact(tensors, left, SCORES[score](torch.float64))
    compiled = torch.compile(
        attention(graph, SCORES[score](dtype)), fullgraph=True, backend="aot_eager"
    )
    assert_equal(results(compiled(*tensors), tensors), wanted, dtype)


@pytest.mark.parametrize("batch", [(), (2,)], ids=["a graph", "a batch"])
@pytest.mark.parametrize("score", ["scaled_dot", "additive", "gat", "gatv2", "cosine"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_layers_give_the_weights_that_they_used(dtype, score, batch):
    layer = GraphAttention(3, 4, 2, score=score, out_bias=False).to(dtype)
    x, edges = rand(*batch, 13, 3, dtype=dtype), graphs()["self loops"].edge_index
    edges = torch.cat([edges, graphs()["some"].edge_index], dim=1).unique(dim=1)
    bias = (edges[1] % 4 != 0).to(dtype).log()
    output, (_, weights) = layer(x, edges, return_attention_weights=True, edge_bias=bias)
    assert output.isfinite().all()
    assert (output[..., ::4, :] == 0).all()
    torch.testing.assert_close(layer.attention_weights(x, edges, edge_bias=bias), weights)
    with attnkit.capture_attention(layer) as captured:
        layer(x, edges, edge_bias=bias)
    torch.testing.assert_close(captured[""][0], weights)
    sums = weights.new_zeros(*batch, 13, 2).index_add(-2, edges[1], weights)
    is_served = torch.zeros(13, dtype=torch.bool).index_fill(0, edges[1], True)
    is_served[::4] = False
    torch.testing.assert_close(sums, is_served[:, None].to(dtype).expand_as(sums))
    with watch_attention(layer) as calls:
        layer(x, edges, edge_bias=bias)
    if batch:
        with pytest.raises(
            ValueError, match=r"edges that carry nothing in a batch; attnkit\.edge_"
        ):
            calls[0].weights()
    else:
        (call,) = calls
        mean = averages(call.weights.T, attnkit.Edges(edges, 13), call.value)
        torch.testing.assert_close(mean, call.seen_in[0])
