"""Polynormer against PyG's with copied weights, and by its formula with several heads."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import models as pyg

import attnkit
from attnkit.models.polynormer import PolynormerGlobal

NODES, HIDDEN, CLASSES = 17, 12, 3


def randomized(model):
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.2, 1.0)
            tensor.data *= torch.randint(0, 2, tensor.shape) * 2 - 1 if tensor.ndim > 1 else 1
    return model.double().eval()


def copied(theirs, ours):
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


def test_is_pygs_locally_and_then_globally():
    torch.manual_seed(1)
    theirs = randomized(
        pyg.Polynormer(HIDDEN, HIDDEN, CLASSES, local_layers=3, beta=0.6, local_attn=True)
    )
    ours = attnkit.Polynormer(
        HIDDEN, HIDDEN, CLASSES, num_local_layers=3, beta=0.6, local_steps=2
    ).double()
    copied(theirs, ours)
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
    model = attnkit.Polynormer(5, HIDDEN, CLASSES, num_local_layers=2, heads=3, local_steps=1)
    x, edge_index = torch.randn(NODES, 5), torch.randint(0, NODES, (2, 61))
    model(x, edge_index).sum().backward()
    assert all(p.grad is None for p in (*model.global_layers.parameters(), model.head.weight))
    assert all(p.grad is not None for p in model.local_layers.parameters())
    model.zero_grad()
    model(x, edge_index).sum().backward()
    assert all(p.grad is not None for p in (*model.global_layers.parameters(), model.head.weight))
    assert model.local_head.weight.grad is None
    other = attnkit.Polynormer(5, HIDDEN, CLASSES, num_local_layers=2, heads=3, local_steps=1)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.eval()(x, edge_index), model.eval()(x, edge_index))
    assert attnkit.Polynormer(5, HIDDEN, CLASSES).local_head is None


def test_global_layer_is_its_formula_head_by_head():
    torch.manual_seed(3)
    layer = randomized(PolynormerGlobal(HIDDEN, 3, 0.4, 0.5, "auto"))
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


def test_sparse_features_and_wrong_numbers():
    model = attnkit.Polynormer(5, HIDDEN, CLASSES).eval()
    x, edge_index = torch.randn(NODES, 5).relu(), torch.randint(0, NODES, (2, 61))
    torch.testing.assert_close(model(x.to_sparse_csr(), edge_index), model(x, edge_index))
    with pytest.raises(ValueError, match=r"beta: expected 0 to 1, got 1\.5"):
        attnkit.Polynormer(5, HIDDEN, CLASSES, beta=1.5)
