"""SGFormer and Polynormer: against PyG's with copied weights, and by their formulas."""

import pytest
import torch
from layer_support import assert_same
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import GCNConv
from torch_geometric.nn import models as pyg
from torch_geometric.nn.attention import SGFormerAttention

import attnkit
from attnkit.models.polynormer import PolynormerGlobal
from attnkit.models.sgformer import GraphConvolution, SimpleGlobalAttention

NODES, IN, HIDDEN, CLASSES, WIDTH, HEADS = 17, 5, 12, 3, 7, 3


def randomized(model):
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.2, 1.0)
            tensor.data *= torch.randint(0, 2, tensor.shape) * 2 - 1 if tensor.ndim > 1 else 1
    return model.eval()


def copied_sgformer(theirs, ours):
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
def test_sgformer_is_pygs(heads):
    torch.manual_seed(1)
    theirs = randomized(pyg.SGFormer(
        IN, HIDDEN, CLASSES, trans_num_layers=2, trans_num_heads=heads, gnn_num_layers=3,
        graph_weight=0.7,
    ))  # fmt: skip
    ours = attnkit.SGFormer(
        IN, HIDDEN, CLASSES, num_layers=2, heads=heads, num_convolutions=3, graph_weight=0.7
    )
    ours.eval()
    copied_sgformer(theirs, ours)
    x = torch.randn(NODES, IN, requires_grad=True)
    edge_index = torch.randint(0, NODES, (2, 61)).unique(dim=1)
    batch = torch.zeros(NODES, dtype=torch.long)
    results = []
    for output in (ours(x, edge_index).log_softmax(dim=1), theirs(x, edge_index, batch)):
        results.append((output, torch.autograd.grad(output.square().sum(), x)[0]))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)  # theirs is in float32 only


@pytest.mark.parametrize(
    ("make", "option", "message"),
    [
        (attnkit.SGFormer, {"graph_weight": 2}, "graph_weight: expected 0 to 1, got 2"),
        (attnkit.Polynormer, {"beta": 1.5}, r"beta: expected 0 to 1, got 1\.5"),
    ],
)
def test_edges_and_sparse_features_are_taken_and_wrong_numbers_named(make, option, message):
    torch.manual_seed(2)
    model = make(IN, HIDDEN, CLASSES).eval()
    x, edge_index = torch.randn(NODES, IN).relu(), torch.randint(0, NODES, (2, 61))
    expected = model(x, edge_index)
    torch.testing.assert_close(model(x, attnkit.Edges(edge_index, NODES)), expected)
    torch.testing.assert_close(model(x.to_sparse_csr(), edge_index), expected)
    with pytest.raises(ValueError, match=message):
        make(IN, HIDDEN, CLASSES, **option)


def copied_polynormer(theirs, ours):
    for place, layer in enumerate(ours.local_layers):
        gat = theirs.local_convs[place]
        layer.attention.projections.load_state_dict({
            "value_proj.weight": gat.lin.weight, "query_vector": gat.att_dst[0],
            "key_vector": gat.att_src[0],
        })  # fmt: skip
        for name, other in (
            ("residual_proj", theirs.lins), ("gate_proj", theirs.h_lins),
            ("batch_norm", theirs.post_bns), ("norm", theirs.lns),
        ):  # fmt: skip
            getattr(layer, name).load_state_dict(other[place].state_dict())
    for layer, other in zip(ours.global_layers, theirs.global_attn, strict=True):
        for name, module in (
            ("query_proj", other.q), ("key_proj", other.k), ("value_proj", other.v),
            ("gate_proj", other.h_lins), ("norm", other.lns), ("out_proj", other.lin_out),
        ):  # fmt: skip
            getattr(layer, name).load_state_dict(module.state_dict())
    ours.norm.load_state_dict(theirs.ln.state_dict())
    ours.head.load_state_dict(theirs.pred_global.state_dict())
    ours.local_head.load_state_dict(theirs.pred_local.state_dict())
    nn.init.eye_(ours.embed.weight)  # which PyG's leaves out
    nn.init.zeros_(ours.embed.bias)


def test_polynormer_is_pygs_locally_and_then_globally():
    torch.manual_seed(1)
    theirs = randomized(
        pyg.Polynormer(HIDDEN, HIDDEN, CLASSES, local_layers=3, beta=0.6, local_attn=True)
    ).double()
    ours = attnkit.Polynormer(
        HIDDEN, HIDDEN, CLASSES, num_local_layers=3, beta=0.6, local_steps=2
    ).double()
    copied_polynormer(theirs, ours)
    x = torch.randn(NODES, HIDDEN, dtype=torch.float64, requires_grad=True)
    edge_index = torch.randint(0, NODES, (2, 61))
    batch = torch.zeros(NODES, dtype=torch.long)
    for is_global in (False, True):
        theirs._global = is_global
        results = []
        ours.eval()
        for output in (ours(x, edge_index).log_softmax(dim=1), theirs(x, edge_index, batch)):
            results.append((output, torch.autograd.grad(output.square().sum(), x)[0]))
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)  # they add 1e-6
        ours.train()
        for _ in range(2):  # steps of training
            for layer in ours.local_layers:
                layer.batch_norm.eval()
            ours(x, edge_index)
    assert int(ours.steps) == 4


def test_local_steps_train_the_local_layers_and_then_all():
    torch.manual_seed(2)
    model = attnkit.Polynormer(IN, HIDDEN, CLASSES, num_local_layers=2, heads=3, local_steps=1)
    x, edge_index = torch.randn(NODES, IN), torch.randint(0, NODES, (2, 61))
    model(x, edge_index).sum().backward()
    assert all(p.grad is None for p in (*model.global_layers.parameters(), model.head.weight))
    assert all(p.grad is not None for p in model.local_layers.parameters())
    model.zero_grad()
    model(x, edge_index).sum().backward()
    assert all(p.grad is not None for p in (*model.global_layers.parameters(), model.head.weight))
    assert model.local_head.weight.grad is None
    other = attnkit.Polynormer(IN, HIDDEN, CLASSES, num_local_layers=2, heads=3, local_steps=1)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.eval()(x, edge_index), model.eval()(x, edge_index))
    assert attnkit.Polynormer(IN, HIDDEN, CLASSES).local_head is None


def test_global_layer_is_its_formula_head_by_head():
    torch.manual_seed(3)
    layer = randomized(PolynormerGlobal(HIDDEN, 3, 0.4, 0.5, "auto")).double()
    x = torch.randn(NODES, HIDDEN, dtype=torch.float64)
    heads = []
    for part in range(3):
        rows = slice(4 * part, 4 * part + 4)
        query, key = ((x @ p.weight[rows].T).sigmoid() for p in (layer.query_proj, layer.key_proj))
        weights = query @ key.T
        weights = weights / weights.sum(dim=1, keepdim=True)
        heads.append(weights @ (x @ layer.value_proj.weight[rows].T))
    y = layer.norm(torch.cat(heads, dim=1)) * (layer.gate_proj(x) + 0.4)
    torch.testing.assert_close(layer(x), F.relu(layer.out_proj(y)))


def test_equal_scores_make_pygs_convolution():
    torch.manual_seed(1)
    edge_index = torch.randint(0, NODES, (2, 41)).unique(dim=1)
    assert (edge_index[0] == edge_index[1]).any()
    theirs = GCNConv(IN, WIDTH).double()
    torch.nn.init.normal_(theirs.bias)
    ours = GraphConvolution(IN, WIDTH).double()
    ours.load_state_dict({"proj.weight": theirs.lin.weight, "bias": theirs.bias})
    x = torch.randn(NODES, IN, dtype=torch.float64, requires_grad=True)
    ours_of = ours(x, attnkit.Edges(edge_index, NODES))
    assert_same(ours_of, theirs(x, edge_index), [x], rtol=1e-7, atol=1e-7)


def test_global_attention_is_pygs_and_its_weights_say_how():
    torch.manual_seed(2)
    theirs = SGFormerAttention(IN * HEADS, HEADS, WIDTH)  # in float32 only
    ours = SimpleGlobalAttention(IN * HEADS, WIDTH, HEADS)
    ours.load_state_dict({
        f"{name}_proj.weight": getattr(theirs, name[0]).weight
        for name in ("query", "key", "value")
    })  # fmt: skip
    x = torch.randn(NODES, IN * HEADS, requires_grad=True)
    assert_same(ours(x), theirs(x[None])[0], [x], rtol=1e-5, atol=1e-5)
    weights = ours.attention_weights(x)
    value = ours.value_proj(x).unflatten(1, (HEADS, WIDTH)).transpose(0, 1)
    torch.testing.assert_close((weights @ value).mean(dim=0), ours(x))
    torch.testing.assert_close(weights.sum(dim=2), torch.ones_like(weights[..., 0]))
    chosen = ours.attention_weights(x, rows=[4, 0], heads=1)
    torch.testing.assert_close(chosen, weights[1:2, [4, 0]])
    of_graphs = ours.attention_weights(x, torch.tensor([5, 0, 12]))
    torch.testing.assert_close(of_graphs[:, 5:, 5:], ours.attention_weights(x[5:]))
    assert (of_graphs[:, :5, 5:] == 0).all()
    output = ours(x, torch.tensor([5, 0, 12]))
    torch.testing.assert_close((of_graphs @ value).mean(dim=0), output)
