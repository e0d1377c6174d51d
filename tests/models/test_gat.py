"""GAT against PyG's by copied weights, GAT-sep, equivariance, sparse features."""

import pytest
import torch
from layer_support import assert_same
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv, models
from torch_geometric.utils import add_self_loops, remove_self_loops

from attnkit import GAT, Edges, interop
from attnkit.core.masks.adjacency import Adjacency

NODES, CHANNELS, CLASSES = 17, 13, 5
VARIANTS = {
    "published": {},
    "deeper": {"num_layers": 3, "residual": True, "norm": "layer", "out_heads": 3},
    "one layer": {"num_layers": 1, "heads": 8, "out_heads": 3},
    "gatv2": {"score": "gatv2", "norm": "batch"},
    "dot": {"score": "scaled_dot", "edge_dim": 2, "activation": "relu"},
    "blocks": {"mlp_ratio": 1.5, "norm": "layer", "activation": "gelu", "edge_dim": 2},
    "sep": {"mlp_ratio": 1.0, "norm": "layer", "separate_self": True, "activation": "gelu"},
    "linear": {"first_linear": True, "last_linear": True, "residual": True, "norm": "batch"},
    "one, linear": {"num_layers": 1, "last_linear": True, "norm": "layer", "activation": "relu"},
}


def make(**options):
    model = GAT(CHANNELS, 12, CLASSES, **{"heads": 3, **options}).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator).double()
    return model


def graph(num_edges=53):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(NODES, (2, num_edges), generator=generator)


def inputs(options):
    x = torch.randn(NODES, CHANNELS, dtype=torch.float64, requires_grad=True)
    attr = torch.randn(53, 2, dtype=torch.float64) if "edge_dim" in options else None
    return x, graph(), attr


def test_by_default_it_is_the_published_network():
    model = GAT(1433, 64, 7)
    first, second = (layer.attention for layer in model.layers)
    assert (first.heads, first.out_channels, second.heads, second.out_channels) == (8, 8, 1, 7)
    # 8 heads of 1433 × 8 weights, 2 vectors of 8 and a bias of 8; then 64 × 7, 2 × 7 and 7
    assert sum(p.numel() for p in model.parameters()) == 8 * (1433 * 8 + 24) + 64 * 7 + 14 + 7
    drops = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert [*drops, first.dropout_p, second.dropout_p] == [0.6] * 4
    assert first.add_self_loops
    assert second.add_self_loops
    assert isinstance(model.layers[0].activation, nn.ELU)


@pytest.mark.parametrize("v2", [False, True])
def test_it_is_pygs_gat_by_copied_weights(v2):
    theirs = models.GAT(CHANNELS, 12, 2, CLASSES, heads=3, dropout=0.6, act="elu", v2=v2).double()
    for parameter in theirs.parameters():
        parameter.data = 0.4 * torch.randn_like(parameter)
    theirs.convs[-1].concat = False
    theirs.eval()
    ours = make(score="gatv2" if v2 else "gat", out_heads=3).eval()
    for layer, conv in zip(ours.layers, theirs.convs, strict=True):
        layer.attention.load_state_dict(interop.from_pyg(conv).state_dict())
    x, edge_index, _ = inputs({})
    assert_same(ours(x, edge_index), theirs(x, edge_index), [x])


def test_gat_sep_is_what_its_paper_says():
    model = make(mlp_ratio=1.0, norm="layer", separate_self=True, activation="gelu").eval()
    x, edge_index, _ = inputs({})
    hidden = F.gelu(model.stem[0](x))
    for block in model.layers:
        normed = block.norm(hidden)
        own = F.linear(normed, block.attention.projections.value_proj.weight)
        weights = block.attention.attention_weights(normed, edge_index)
        assert weights.shape == (53, 3)  # no self-loops
        messages = own.unflatten(1, (3, 4))[edge_index[0]] * weights[..., None]
        gathered = torch.zeros(NODES, 3, 4).double().index_add(0, edge_index[1], messages)
        both = torch.cat([own, gathered.flatten(1)], dim=1) + block.attention.out_bias
        first, _, _, second, _ = block.mlp
        hidden = hidden + second(F.gelu(first(both)))
    norm, head = model.head
    torch.testing.assert_close(model(x, edge_index), head(norm(hidden)))


def classic(convs, roots, norms, last, first=None):
    """The network of Luo et al. 2024, of PyG's layers, in evaluation."""

    def forward(x, edge_index):
        edge_index = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=len(x))[0]
        x = x if first is None else first(x)
        for conv, root, norm in zip(convs, roots, norms, strict=True):
            x = norm(conv(x, edge_index) + root(x)).relu()
        return last(x)

    return forward


@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("first_linear", [False, True])
def test_it_is_the_classic_network_of_2024(first_linear, norm):
    ours = make(
        heads=1, num_layers=3, norm=norm, first_linear=first_linear, last_linear=True,
        residual=True, activation="relu", dropout_p=0.2, input_dropout_p=0.0,
        attention_dropout_p=0.0,
    )  # fmt: skip
    sizes = [12 if first_linear else CHANNELS, 12, 12]
    convs = [GATConv(n, 12, add_self_loops=False, bias=False).double() for n in sizes]
    roots = [nn.Linear(n, 12).double() for n in sizes]
    for layer, conv, root in zip(ours.layers, convs, roots, strict=True):
        attention = {**interop.from_pyg(conv).state_dict()}
        attention |= {f"residual_proj.{name}": value for name, value in root.state_dict().items()}
        layer.attention.load_state_dict(attention)
    x, edge_index, _ = inputs({})
    ours.train()(x, edge_index)  # batch norms have seen something
    ours.eval()
    first, last = ours.stem[1] if first_linear else None, ours.head[1]
    theirs = classic(convs, roots, [layer.norm for layer in ours.layers], last, first)
    assert_same(ours(x, edge_index), theirs(x, edge_index), [x])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_layers": 3}, [0.3, 0.3, 0.3]),
        ({"num_layers": 3, "input_dropout_p": 0.1}, [0.1, 0.3, 0.3]),
        ({"input_dropout_p": 0.0, "last_linear": True}, [0.0, 0.3, 0.3]),
        ({"input_dropout_p": 0.1, "first_linear": True, "last_linear": True}, [0.1, *[0.3] * 3]),
    ],
    ids=str,
)
def test_what_is_dropped(options, expected):
    model = make(dropout_p=0.3, attention_dropout_p=0.0, **options)
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda m, args, out: seen.append((m.p, args[0], out)))
    x, edge_index, _ = inputs({})
    model(x, edge_index)
    assert [p for p, _, _ in seen] == expected
    assert seen[0][1] is x
    for p, before, after in seen:
        share = (after == 0).double().mean() - (before == 0).double().mean()
        assert (share > 0) == (p > 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_counts_and_the_order_of_nodes_does_not(variant):
    model = make(**VARIANTS[variant])
    x, edge_index, attr = inputs(VARIANTS[variant])
    model(x, edge_index, attr).square().sum().backward()
    for name, parameter in [*model.named_parameters(), ("x", x)]:
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    order, logits = torch.randperm(NODES), model.eval()(x, edge_index, attr)
    assert logits.shape == (NODES, CLASSES)
    torch.testing.assert_close(model(x[order], order.argsort()[edge_index], attr), logits[order])
    torch.testing.assert_close(model(x, Edges(edge_index, NODES), attr), logits)


def test_a_tensor_of_edges_is_sorted_once_for_all_layers(monkeypatch):
    sorts = []

    def count(*given, of=Adjacency.of):
        sorts.append(given)
        return of(*given)

    monkeypatch.setattr(Adjacency, "of", count)
    model = make(num_layers=3, backend="edges")
    x, edge_index, _ = inputs({})
    model(x, edge_index)
    assert len(sorts) == 1
    edges = Edges(edge_index, NODES)
    model(x, edges)
    model(x, edges)
    assert len(sorts) == 2


@pytest.mark.parametrize("variant", ["published", "gatv2", "sep", "linear"])
def test_sparse_features(variant):
    model = make(**VARIANTS[variant])
    x = torch.randn(NODES, CHANNELS, dtype=torch.float64)
    x[x < 0.8] = 0
    sparse, edge_index = x.to_sparse_csr(), graph()
    assert model(sparse, edge_index).shape == (NODES, CLASSES)
    if variant != "sep":  # whose dropout comes after the first linear layer
        assert not torch.equal(model(sparse, edge_index), model(sparse, edge_index))
    model.eval()
    torch.testing.assert_close(model(sparse, edge_index), model(x, edge_index))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "heads: 5 does not divide hidden_channels 12"),
        ({"num_layers": 0}, "num_layers: expected at least 1, got 0"),
        ({"num_layers": 1}, "heads: only layers before the last have it, .* expected 8, .* got 3"),
        ({"num_layers": 1, "heads": 8, "norm": "layer"}, "norm: only .* expected None.* 'layer'"),
        ({"num_layers": 1, "heads": 8, "activation": "relu"}, "activation: only .* got 'relu'"),
        ({"separate_self": True}, "separate_self: needs mlp_ratio"),
        ({"mlp_ratio": 1.0, "residual": True}, "residual: the residual blocks .* got True"),
        ({"mlp_ratio": 1.0, "out_heads": 1}, "out_heads: the residual blocks .* got 1"),
        ({"mlp_ratio": 1.0, "last_linear": True}, "last_linear: the residual blocks .* got True"),
        ({"mlp_ratio": 1.0, "first_linear": True}, "first_linear: the residual blocks .* got True"),
        ({"mlp_ratio": 1.0, "input_dropout_p": 0.0}, "input_dropout_p: the .* got 0.0"),
        (
            {"last_linear": True, "out_heads": 1},
            "out_heads: with last_linear .* expected None, got 1",
        ),
        ({"input_dropout_p": 2.0}, "input_dropout_p: expected .* got 2.0"),
        ({"mlp_ratio": 0.01}, "mlp_ratio: expected at least one channel, got 0.01 of 12"),
        ({"norm": "group"}, "norm: expected 'layer', 'batch' or None, got 'group'"),
        ({"activation": "tanh"}, "activation: expected 'elu', 'relu' or 'gelu', got 'tanh'"),
        ({"score": "gat2"}, "score: expected one of .*got 'gat2'"),
        *(
            ({**first, "in_channels": channels}, f"in_channels: .*got {got}")
            for first in ({"first_linear": True}, {"mlp_ratio": 1.0})
            for channels, got in (((13, 13), r"\(13, 13\)"), (-1, "-1"), (0, "0"))
        ),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        GAT(
            **{
                "in_channels": CHANNELS,
                "hidden_channels": 12,
                "num_classes": 5,
                "heads": 3,
                **options,
            }
        )
