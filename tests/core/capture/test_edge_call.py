"""What an attention over edges tells: weights in the caller's order, and their gradients."""

import pytest
import torch
from torch import nn

import attnkit
from attnkit.core.capture.calls import edge_call, is_of_edges
from attnkit.core.inputs import check_inputs
from attnkit.layers.graph import attention as module

NODES, EDGES, CHANNELS, HEADS, DIM, FEATURES = 13, 41, 5, 3, 7, 2


def make_graph():
    torch.manual_seed(1)
    edges = torch.randint(NODES, (2, EDGES))
    edges[:, 5] = edges[:, 11]
    edges[:, 17] = 4
    return torch.randn(NODES, CHANNELS), edges, torch.randn(EDGES, FEATURES)


def run(monkeypatch, layer, *given):
    """The layer's output and its call."""
    calls = []

    def watched(query, key, value, *, backend, **options):
        query, key, value = query[None], key[None], value[None]
        output = attnkit.attend(query, key, value, **options)
        inputs = check_inputs(query, key, value, **options)
        assert is_of_edges(inputs, is_batched=False)
        assert not is_of_edges(inputs, is_batched=True)
        calls.append(edge_call("layer", inputs, output))
        return output[0]

    monkeypatch.setattr(module, "attend", watched)
    return layer(*given), calls[0]


def randomized(layer):
    torch.manual_seed(2)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer.eval()


@pytest.mark.parametrize("score", ["scaled_dot", "gat", "gatv2"])
@pytest.mark.parametrize("loops", [False, True])
def test_weights_are_those_of_the_layer(monkeypatch, score, loops):
    x, edges, features = make_graph()
    layer = attnkit.GraphAttention(
        CHANNELS, DIM, HEADS, score=score, edge_dim=FEATURES, add_self_loops=loops
    )
    randomized(layer)
    _, call = run(monkeypatch, layer, x, edges, features)
    expected = layer.attention_weights(x, edges, features)
    torch.testing.assert_close(call.weights, expected, atol=1e-6, rtol=0)
    assert torch.equal(call.edge_index[:, :EDGES], edges)
    assert call.is_added_loop.tolist() == [False] * EDGES + [True] * (NODES if loops else 0)
    if loops:
        assert torch.equal(call.edge_index[:, EDGES:], torch.arange(NODES).expand(2, -1))
    is_own_loop = edges[0] == edges[1]
    assert torch.equal(call.is_replaced[:EDGES], is_own_loop & loops)
    assert call.num_nodes == (NODES, NODES)
    assert call.num_heads == HEADS


@pytest.mark.parametrize("loops", [False, True])
def test_gradients_are_those_through_explicit_weights(monkeypatch, loops):
    """Against autograd through Σ_e α_e (value_j + W_v e_ij), the sum written out."""
    x, edges, features = make_graph()
    layer = randomized(
        attnkit.GraphAttention(CHANNELS, DIM, HEADS, edge_dim=FEATURES, add_self_loops=loops)
    )
    output, call = run(monkeypatch, layer, x, edges, features)
    chosen = torch.randn(NODES, HEADS * DIM)
    (by_output,) = torch.autograd.grad((output * chosen).sum(), call.seen_in)
    gradient = call.weight_gradient(by_output)

    alpha = call.weights.clone().requires_grad_()
    source, target = call.edge_index
    carried = call.edge_features.features @ call.edge_features.value_weight.transpose(1, 2)
    message = alpha.T[:, :, None] * (call.value[:, source] + carried)
    sums = torch.zeros(HEADS, NODES, DIM).index_add(1, target, message)
    again = sums.transpose(0, 1).flatten(1) + layer.out_bias
    torch.testing.assert_close(again, output, atol=1e-5, rtol=0)
    (expected,) = torch.autograd.grad((again * chosen).sum(), alpha)
    expected[call.is_replaced] = 0
    torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-4)
    assert not gradient.requires_grad


def test_a_gradient_of_another_shape_is_refused(monkeypatch):
    x, edges, _ = make_graph()
    layer = attnkit.GraphAttention(CHANNELS, DIM, HEADS)
    output, call = run(monkeypatch, layer, x, edges)
    with pytest.raises(ValueError, match=r"gradient: .* \[1, 3, 13, 7\], got \[13, 21\]"):
        call.weight_gradient(torch.ones_like(output))
