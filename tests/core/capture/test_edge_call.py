"""What an attention over edges tells: weights in the caller's order, and their gradients."""

import pytest
import torch
from torch import nn

import attnkit
from attnkit.core.capture.watch import watch_attention

NODES, EDGES, CHANNELS, HEADS, DIM, FEATURES = 13, 41, 5, 3, 7, 2


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("score", ["scaled_dot", "gat", "gatv2"])
def test_weights_and_gradients_are_those_of_the_layer(score, loops):
    """Gradients against autograd through Σ_e α_e (value_j + W_v e_ij), the sum written out."""
    torch.manual_seed(1)
    edges = torch.randint(NODES, (2, EDGES))
    edges[:, 5] = edges[:, 11]
    edges[:, 17] = 4
    x, features = torch.randn(NODES, CHANNELS), torch.randn(EDGES, FEATURES)
    layer = attnkit.GraphAttention(
        CHANNELS, DIM, HEADS, score=score, edge_dim=FEATURES, add_self_loops=loops
    )
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    with watch_attention(nn.ModuleList([layer])) as calls:
        output = layer(x, edges, features)
    (call,) = calls
    assert (call.layer, call.tap) == ("0", "attend")
    assert (call.num_nodes, call.num_heads) == ((NODES, NODES), HEADS)
    expected = layer.attention_weights(x, edges, features)
    torch.testing.assert_close(call.weights, expected.detach(), atol=1e-6, rtol=0)
    added = torch.arange(NODES if loops else 0).expand(2, -1)
    assert torch.equal(call.edge_index, torch.cat([edges, added], dim=1))
    assert call.is_added_loop.tolist() == [False] * EDGES + [True] * added.shape[1]
    assert torch.equal(call.is_replaced[:EDGES], (edges[0] == edges[1]) & loops)

    chosen = torch.randn(NODES, HEADS * DIM)
    (by_output,) = torch.autograd.grad((output * chosen).sum(), call.seen_in)
    gradient = call.weight_gradient(by_output)
    alpha = call.weights.clone().requires_grad_()
    source, target = call.edge_index
    values = call.value[:, source]
    if call.edge_features is not None and call.edge_features.value_weight is not None:
        carried = call.edge_features
        values = values + carried.features @ carried.value_weight.transpose(1, 2)
    sums = torch.zeros(HEADS, NODES, DIM).index_add(1, target, alpha.T[:, :, None] * values)
    again = sums.transpose(0, 1).flatten(1) + layer.out_bias
    torch.testing.assert_close(again, output, atol=1e-5, rtol=0)
    (expected,) = torch.autograd.grad((again * chosen).sum(), alpha)
    expected[call.is_replaced] = 0
    torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-4)
    assert not gradient.requires_grad
    with pytest.raises(ValueError, match=r"gradient: .* \[1, 3, 13, 7\], got \[13, 21\]"):
        call.weight_gradient(torch.ones_like(output))
