"""`to_hetero` of models of attnkit's layers, against PyG's of the same models of PyG's layers."""

import warnings

import pytest
import torch
from torch import nn
from torch_geometric.nn import GATConv, GATv2Conv, SAGEConv, TransformerConv, to_hetero
from torch_geometric.nn import models as pyg_models

import attnkit
from attnkit import GraphAttention, interop
from attnkit.layers import GraphBlock

SIZES = {"paper": (11, 5), "author": (7, 3)}
EDGE_TYPES = [
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "written_by", "author"),
]
METADATA = [*SIZES], EDGE_TYPES
SHAPES = {"paper": [11, 4], "author": [7, 4]}
SCORES = {GATConv: "gat", GATv2Conv: "gatv2", TransformerConv: "scaled_dot"}


def graph():
    generator = torch.Generator().manual_seed(0)
    x_dict = {
        name: torch.randn(*size, dtype=torch.float64, generator=generator)
        for name, size in SIZES.items()
    }
    edge_index_dict = {
        key: torch.stack(
            [torch.randint(SIZES[end][0], (29,), generator=generator) for end in key[::2]]
        )
        for key in EDGE_TYPES
    }
    return x_dict, edge_index_dict


class Net(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.conv1, self.conv2 = first, second
        self.lin = nn.Sequential(nn.Linear(12, 12), nn.ReLU())

    def forward(self, x, edge_index):
        x = self.lin(self.conv1(x, edge_index)).relu()
        return self.conv2(x, edge_index)


class Nested(nn.Module):
    """A layer within a module of one's own."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


def assert_same(theirs, ours, places=None):
    """Ours with the weights of theirs, by the names of PyG's layers, gives what theirs gives."""
    x_dict, edge_index_dict = graph()
    theirs, ours = theirs.double(), ours.double()
    assert {name: len(x) for name, x in ours(x_dict, edge_index_dict).items()} == {
        name: size[0] for name, size in SIZES.items()
    }
    theirs(x_dict, edge_index_dict)
    carried = interop.from_pyg(theirs)
    for name, module in carried.named_modules():
        if isinstance(module, GraphAttention | nn.Linear) and "projections" not in name:
            place, _, rest = name.partition(".")
            ours.set_submodule(f"{(places or {}).get(place, place)}.{rest}", module)
    for x in x_dict.values():
        x.requires_grad_()
    expected, actual = (model(x_dict, edge_index_dict) for model in (theirs, ours))
    for name, output in expected.items():
        assert output.std() > 0.01
        torch.testing.assert_close(actual[name], output)
    torch.testing.assert_close(
        *(
            torch.autograd.grad(sum(y.square().sum() for y in given.values()), [*x_dict.values()])
            for given in (actual, expected)
        )
    )


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("conv", [*SCORES])
@pytest.mark.parametrize("is_nested", [False, True])
def test_one_output_for_each_node_type(conv, aggr, is_nested):
    loops = {} if conv is TransformerConv else {"add_self_loops": False}
    last = {"heads": 2, "concat": False}
    theirs = Net(conv((-1, -1), 4, heads=3, **loops), conv((12, 12), 4, **last, **loops))
    kind = {"score": SCORES[conv], "residual": conv is TransformerConv}
    layers = [
        GraphAttention((-1, -1), 4, heads=3, **kind),
        GraphAttention((-1, -1), 4, **last, **kind),
    ]
    ours = Net(*map(Nested, layers) if is_nested else layers)
    places = {"conv1": "conv1.conv", "conv2": "conv2.conv"} if is_nested else {}
    assert_same(to_hetero(theirs, METADATA, aggr), interop.to_hetero(ours, METADATA, aggr), places)


def test_gat_as_layers_of_pyg():
    class Theirs(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = GATConv((-1, -1), 4, heads=3, add_self_loops=False)
            self.last = GATConv((-1, -1), 5, concat=False, add_self_loops=False)

        def forward(self, x, edge_index):
            return self.last(self.first(x, edge_index).relu(), edge_index)

    ours = attnkit.GAT((-1, -1), 12, 5, heads=3, add_self_loops=False, activation="relu")
    ours = interop.to_hetero(ours, METADATA).eval()
    places = {"first": "layers.0.attention", "last": "layers.1.attention"}
    assert_same(to_hetero(Theirs(), METADATA).eval(), ours, places)


def test_models_of_pyg_and_layers_of_both():
    """PyG's own model, converted; and its layers beside attnkit's."""
    x_dict = {name: torch.randn(size[0], 5) for name, size in SIZES.items()}
    converted = interop.from_pyg(pyg_models.GAT((5, 5), 12, 2, 4, heads=3, add_self_loops=False))
    for model in (converted, Net(SAGEConv((-1, -1), 12), GraphAttention((-1, -1), 4))):
        output = interop.to_hetero(model, METADATA)(x_dict, graph()[1])
        assert {name: list(y.shape) for name, y in output.items()} == SHAPES


def test_residual_blocks_over_edge_features():
    model = attnkit.GAT(5, 12, 4, heads=3, mlp_ratio=2.0, separate_self=True, norm="layer",
                        edge_dim=2)  # fmt: skip
    _, edge_index_dict = graph()
    x_dict = {name: torch.randn(size[0], 5) for name, size in SIZES.items()}
    edge_attr_dict = {key: torch.randn(29, 2) for key in EDGE_TYPES}
    hetero = interop.to_hetero(model, METADATA).eval()
    output = hetero(x_dict, edge_index_dict, edge_attr_dict)
    assert {name: list(y.shape) for name, y in output.items()} == SHAPES
    edge_attr_dict[EDGE_TYPES[1]] += 1
    changed = hetero(x_dict, edge_index_dict, edge_attr_dict)
    assert not torch.allclose(changed["paper"], output["paper"])


def test_to_hetero_of_pyg_itself_names_this_one():
    """It would give one output for each edge type, never summed, without a word."""
    layers = GraphAttention((-1, -1), 4, heads=3), GraphAttention((-1, -1), 4)
    for model in (
        Net(*layers),
        Net(SAGEConv((-1, -1), 12), layers[1]),
        attnkit.GAT((-1, -1), 12, 4, heads=3, add_self_loops=False),
        Nested(attnkit.GAT((-1, -1), 12, 4, heads=3, add_self_loops=False)),
        Nested(GraphBlock(5, GraphAttention(5, 5), nn.Identity())),
    ):
        with pytest.raises(TypeError, match=r"use attnkit\.interop\.to_hetero with the same"):
            to_hetero(model, METADATA)
        interop.to_hetero(model, METADATA)


def test_what_cannot_be_converted_is_refused():
    with pytest.raises(ValueError, match="model: Net has no GraphAttention"):
        interop.to_hetero(Net(nn.Linear(5, 5), nn.Linear(5, 5)), METADATA)
    with pytest.raises(ValueError, match="GraphTransformer cannot be traced by torch"):
        interop.to_hetero(attnkit.GraphTransformer(5, 12, 4, heads=3), METADATA)
    with pytest.raises(ValueError, match="'add_self_loops' attribute set to 'True'"):
        interop.to_hetero(attnkit.GAT(5, 12, 4, heads=3), METADATA)
    with pytest.raises(ValueError, match="in_channels: mlp_ratio needs one number, got"):
        attnkit.GAT((5, 3), 12, 4, heads=3, mlp_ratio=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        interop.to_hetero(attnkit.GAT(-1, 12, 4, heads=3, add_self_loops=False), METADATA)
