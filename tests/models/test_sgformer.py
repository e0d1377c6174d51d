"""SGFormer against PyG's with copied weights."""

import pytest
import torch
from torch_geometric.nn import models as pyg

import attnkit

NODES, IN, HIDDEN, CLASSES = 17, 5, 12, 3


def randomized(model):
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.uniform_(tensor, 0.2, 1.0)
            tensor.data *= torch.randint(0, 2, tensor.shape) * 2 - 1 if tensor.ndim > 1 else 1
    return model.eval()


def copied(theirs, ours):
    """Parameters and buffers, in the order in which both have them."""
    names = {
        "global_embed": theirs.trans_conv.fcs[0], "local_embed": theirs.graph_conv.fcs[0],
        "head": theirs.fc,
    }  # fmt: skip
    for name, module in names.items():
        getattr(ours, name).load_state_dict(module.state_dict())
    for end, norm in zip(ours.global_ends, theirs.trans_conv.bns, strict=True):
        end[0].load_state_dict(norm.state_dict())
    for end, norm in zip(ours.local_ends, theirs.graph_conv.bns, strict=True):
        end[0].load_state_dict(norm.state_dict())
    for own, other in zip(ours.attentions, theirs.trans_conv.attns, strict=True):
        for name in ("query", "key", "value"):
            getattr(own, f"{name}_proj").load_state_dict(getattr(other, name[0]).state_dict())
    for own, other in zip(ours.convolutions, theirs.graph_conv.convs, strict=True):
        own.load_state_dict({"proj.weight": other.lin.weight, "bias": other.bias})


@pytest.mark.parametrize("heads", [1, 3])
def test_is_pygs(heads):
    torch.manual_seed(1)
    theirs = randomized(pyg.SGFormer(
        IN, HIDDEN, CLASSES, trans_num_layers=2, trans_num_heads=heads, gnn_num_layers=3,
        graph_weight=0.7,
    ))  # fmt: skip
    ours = attnkit.SGFormer(
        IN, HIDDEN, CLASSES, num_layers=2, heads=heads, num_convolutions=3, graph_weight=0.7
    )
    ours.eval()
    copied(theirs, ours)
    x = torch.randn(NODES, IN, requires_grad=True)
    edge_index = torch.randint(0, NODES, (2, 61)).unique(dim=1)
    batch = torch.zeros(NODES, dtype=torch.long)
    results = []
    for output in (ours(x, edge_index).log_softmax(dim=1), theirs(x, edge_index, batch)):
        results.append((output, torch.autograd.grad(output.square().sum(), x)[0]))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)  # theirs is in float32 only


def test_edges_and_sparse_features_are_taken():
    torch.manual_seed(2)
    model = attnkit.SGFormer(IN, HIDDEN, CLASSES).eval()
    x, edge_index = torch.randn(NODES, IN).relu(), torch.randint(0, NODES, (2, 61))
    expected = model(x, edge_index)
    torch.testing.assert_close(model(x, attnkit.Edges(edge_index, NODES)), expected)
    torch.testing.assert_close(model(x.to_sparse_csr(), edge_index), expected)
    with pytest.raises(ValueError, match="graph_weight: expected 0 to 1, got 2"):
        attnkit.SGFormer(IN, HIDDEN, CLASSES, graph_weight=2)
