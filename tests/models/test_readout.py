"""What graph models read out: PyG's pooling, pairs, checkpoints of before, and wrong arguments."""

import pytest
import torch
from layer_support import assert_named
from torch_geometric import nn as pyg

from attnkit import GAT, GraphTransformer, Polynormer, SGFormer, interop
from attnkit.layers import ReceptiveField
from attnkit.models.graph_model import GraphPool, PlainPool, graph_lengths

NODES, IN, HIDDEN, CLASSES = 13, 5, 12, 3
SIZES = (7, 0, 1, 5, 0)  # of graphs, also without nodes
MODELS = {
    "GAT": (GAT, {"heads": 3}),
    "GAT-sep": (GAT, {"heads": 3, "mlp_ratio": 1.0, "norm": "layer"}),
    "GraphTransformer": (GraphTransformer, {"heads": 3, "num_layers": 1}),
    "SGFormer": (SGFormer, {}),
    "Polynormer": (Polynormer, {"heads": 3, "num_local_layers": 1}),
}
POOLED = ["query"]
POOLED += [f"attention.{name}_proj.{kind}"
           for name in ("query", "key", "value", "out") for kind in ("weight", "bias")]  # fmt: skip


def make(name, **options):
    torch.manual_seed(0)
    kind, own = MODELS[name]
    return kind(IN, HIDDEN, CLASSES, **own, **options).eval()


def graph():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NODES, IN, generator=generator)
    return x, torch.randint(NODES, (2, 41), generator=generator)


@pytest.mark.parametrize("pool", ["mean", "sum", "max"])
def test_plain_pools_are_pygs(pool):
    ours = PlainPool(pool)
    theirs = getattr(pyg, f"global_{'add' if pool == 'sum' else pool}_pool")
    lengths = torch.tensor(SIZES)
    batch = torch.arange(len(SIZES)).repeat_interleave(lengths)
    # small integers, so that two nodes share a maximum
    x = torch.randint(-3, 0, (NODES, HIDDEN)).double().requires_grad_()
    for found, expected in (
        (ours(x, lengths), theirs(x, batch, len(SIZES))),
        (ours(x), theirs(x, torch.zeros_like(batch))),
    ):
        torch.testing.assert_close(found, expected)
        weight = torch.randn_like(found)
        gradients = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_attention_pools_each_graph():
    pool = GraphPool(HIDDEN, 3).double()
    x, lengths = torch.randn(10, HIDDEN, dtype=torch.float64), torch.tensor([3, 0, 7])
    pooled = pool(x, lengths)
    for row, part in zip(pooled, x.split(lengths.tolist()), strict=True):
        expected = pool.attention(pool.query, part[None])[0, 0] if len(part) else None
        torch.testing.assert_close(
            row, pool.attention.out_proj.bias if expected is None else expected
        )
    assert graph_lengths(torch.tensor([0, 0, 2])).tolist() == [2, 0, 1]


def read_of(model, **given):
    """What the last linear layer reads of a graph, and the logits."""
    last = model.head[-1] if isinstance(model, GAT) else model.head
    seen = []
    handle = last.register_forward_hook(lambda _, read, out: seen.append((read[0], out)))
    logits = model(*graph(), **given)
    handle.remove()
    assert logits is seen[0][1]
    return seen[0][0]


@pytest.mark.parametrize("name", MODELS)
def test_the_last_linear_layer_reads_nodes_graphs_or_pairs(name):
    nodes = read_of(make(name, **({"last_linear": True} if name == "GAT" else {})))
    assert nodes.shape == (NODES, HIDDEN)
    pairs = torch.tensor([[0, 3, 3, 12], [1, 2, 3, 0]])
    expected = torch.cat([nodes[pairs[0]], nodes[pairs[1]]], dim=1)
    torch.testing.assert_close(read_of(make(name, readout="edge"), pairs=pairs), expected)
    for pool in ("mean", "sum", "max"):
        expected = getattr(nodes, "amax" if pool == "max" else pool)(0, keepdim=True)
        found = read_of(make(name, readout="graph", pool=pool))
        torch.testing.assert_close(found, expected)
    model = make(name, readout="graph")
    torch.testing.assert_close(read_of(model), model.pool(nodes))
    batch = torch.zeros(NODES, dtype=torch.long)
    assert read_of(model, batch=batch, num_graphs=3).shape == (3, HIDDEN)


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_name_what_pools_as_before(name):
    """And in the order in which optimizers number parameters: before the head."""
    keys = [*make(name, readout="graph").state_dict()]
    plain = [*make(name, **({"last_linear": True} if name == "GAT" else {})).state_dict()]
    added = [key for key in keys if key not in plain]
    assert added == [f"pool.{key}" for key in POOLED]
    if "GAT" not in name:
        place = keys.index(added[-1])
        assert keys[place + 1 :] == ["head.weight", "head.bias"]


def test_gat_pools_what_a_linear_layer_reads():
    graphs = make("GAT", readout="graph", num_layers=1)
    assert graphs.num_hops is None
    assert graphs.hops is None
    assert [layer.attention.heads for layer in graphs.layers] == [3]
    logits = graphs(*graph())
    assert logits.shape == (1, CLASSES)
    with pytest.raises(ValueError, match=r"out_heads: with readout='graph' a linear .* got 1"):
        make("GAT", readout="graph", out_heads=1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"readout": "graphs"}, {}, "readout: expected 'node', 'graph' or 'edge', got 'graphs'"),
        ({"readout": "graph", "pool": "min"}, {}, "pool: expected .* got 'min'"),
        ({"pool": "mean"}, {}, "pool: only .*'attention', the default, got 'mean' .* 'node'"),
        ({"readout": "edge"}, {}, "pairs: only for the readout 'edge', got None in 'edge'"),
        ({}, {"pairs": torch.zeros(2, 1).long()}, r"pairs: .* got \[2, 1\] in 'node'"),
        ({}, {"batch": torch.zeros(5).long()}, r"batch: expected \[13 nodes\], .* got \[5\]"),
        ({}, {"batch": -torch.arange(13)}, "batch: expected nodes in the order of their graphs"),
        ({"readout": "graph"}, {"num_graphs": 2}, "num_graphs: 2 need batch, the graph of each"),
        (
            {"readout": "graph"},
            {"num_graphs": 2, "batch": torch.arange(13)},
            "num_graphs: batch has 13, got 2",
        ),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(name, options, given, message):
    with pytest.raises(ValueError, match=message):
        make(name, **options)(*graph(), **given)


@pytest.mark.parametrize("name", MODELS)
def test_one_graph_without_nodes_is_as_in_a_batch(name):
    nothing = torch.empty(0, IN), torch.empty(2, 0, dtype=torch.long)
    model = make(name, readout="graph", pool="max").eval()
    batch = torch.empty(0, dtype=torch.long)
    torch.testing.assert_close(model(*nothing), model(*nothing, batch=batch, num_graphs=1))


WRONG_PAIRS = [
    ([[0, 1], [2, 3], [4, 5]], r"ValueError: .*shape \[2, pairs\], got \[3, 2\], transposed\?"),
    ([0, 1], r"ValueError: pairs: expected the shape \[2, pairs\], got \[2\]$"),
    ([[0.0, 1.0], [2.0, 3.0]], "TypeError: pairs: expected integers .*, got torch.float32"),
    ([[True, False], [False, True]], "TypeError: pairs: expected integers .*, got torch.bool"),
    ([[0, -1], [2, 3]], "IndexError: pairs: go from -1 to 3, expected nodes 0 to 12"),
    ([[0, 1], [2, 13]], "IndexError: pairs: go from 0 to 13, expected nodes 0 to 12"),
]


@pytest.mark.parametrize(("pairs", "message"), WRONG_PAIRS)
def test_wrong_pairs_and_graphs_are_named(pairs, message):
    model = make("GraphTransformer", readout="edge")
    assert_named(lambda: model(*graph(), pairs=torch.tensor(pairs)), message)
    model, batch = make("GAT", readout="graph"), torch.zeros(NODES)
    message = r"TypeError: batch: expected integers \[nodes\], got torch.float32"
    assert_named(lambda: model(*graph(), batch=batch), message)


@pytest.mark.parametrize("name", ["GAT", "GraphTransformer"])
def test_a_part_of_a_graph_is_for_nodes(name):
    local = {"global_attention": None} if name == "GraphTransformer" else {}
    x, edge_index = graph()
    field = ReceptiveField.of(edge_index, NODES, torch.tensor([1]), 2 if name == "GAT" else 1)
    with pytest.raises(ValueError, match=r"edge_index: a receptive field is for .*'node', got"):
        make(name, readout="graph", **local)(field.rows(x), field)


def test_to_hetero_is_of_nodes():
    metadata = ["a", "b"], [("a", "to", "b"), ("b", "to", "a")]
    model = GAT((IN, IN), HIDDEN, CLASSES, heads=3, add_self_loops=False, readout="graph")
    with pytest.raises(ValueError, match="to_hetero: expected the readout 'node', got 'graph'"):
        interop.to_hetero(model, metadata)
