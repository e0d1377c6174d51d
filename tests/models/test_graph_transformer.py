"""The graph transformer: graphs in a batch are each alone, and every option does something."""

import pytest
import torch
from torch.nn import functional as F
from torch_geometric.data import Batch, Data
from torch_geometric.nn import TransformerConv
from torch_geometric.transforms import AddLaplacianEigenvectorPE, AddRandomWalkPE

import attnkit
from attnkit.models.graph_model import GraphPool, graph_lengths
from attnkit.models.graph_transformer import GraphTransformer, expander_edges

IN, HIDDEN, CLASSES, EDGE_DIM = 5, 12, 3, 2


def some_graphs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    graphs = []
    for num_nodes in (7, 1, 11):
        num_edges = 3 * num_nodes if num_nodes > 1 else 0
        graphs.append(
            Data(
                x=torch.randn(num_nodes, IN, generator=generator, dtype=torch.float64),
                edge_index=torch.randint(num_nodes, (2, num_edges), generator=generator),
                edge_attr=torch.randn(
                    num_edges, EDGE_DIM, generator=generator, dtype=torch.float64
                ),
            )
        )
    return graphs


def make(**options):
    torch.manual_seed(0)
    model = GraphTransformer(
        IN, HIDDEN, CLASSES, num_layers=2, heads=3, edge_dim=EDGE_DIM, **options
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


def test_nodes_have_no_order():
    model = make()
    graph = some_graphs()[2]
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    place = order.argsort()
    expected = model(graph.x, graph.edge_index, graph.edge_attr)
    permuted = model(graph.x[order], place[graph.edge_index], graph.edge_attr)
    torch.testing.assert_close(permuted, expected[order])


def test_each_branch_sees_what_it_should():
    """Without global attention a node knows its neighbours' neighbours at two layers; with it, all
    nodes of its graph."""
    chain = torch.stack([torch.arange(6), torch.arange(1, 7)])
    x = torch.randn(7, IN, dtype=torch.float64, requires_grad=True)
    edge_attr = torch.randn(6, EDGE_DIM, dtype=torch.float64)
    for global_attention, seen in ((None, [4, 5, 6]), ("softmax", list(range(7)))):
        output = make(global_attention=global_attention)(x, chain, edge_attr)
        (gradient,) = torch.autograd.grad(output[6].sum(), x)
        assert gradient.abs().sum(1).nonzero().flatten().tolist() == seen
    torch.manual_seed(0)
    model = GraphTransformer(IN, HIDDEN, CLASSES, local=None, heads=3).double().eval()
    other = torch.stack([torch.arange(6), torch.arange(6)])
    torch.testing.assert_close(model(x, chain), model(x, other))


def test_pairs_of_nodes():
    model = make(readout="edge")
    graph = some_graphs()[0]
    pairs = torch.tensor([[0, 3, 3], [1, 2, 3]])
    logits = model(graph.x, graph.edge_index, graph.edge_attr, pairs=pairs)
    assert logits.shape == (3, CLASSES)
    swapped = model(graph.x, graph.edge_index, graph.edge_attr, pairs=pairs.flip(0))
    assert not torch.allclose(logits[:2], swapped[:2])
    torch.testing.assert_close(logits[2], swapped[2])


@pytest.mark.parametrize("transform", [AddRandomWalkPE(4), AddLaplacianEigenvectorPE(3)], ids=str)
def test_positions_of_pyg(transform):
    graph = some_graphs()[2]
    graph.edge_index = torch.cat([graph.edge_index, graph.edge_index.flip(0)], dim=1)
    graph.edge_attr = torch.cat([graph.edge_attr, graph.edge_attr])
    graph = transform(graph)
    positions = graph.get("random_walk_pe", graph.get("laplacian_eigenvector_pe")).double()
    model = make(position_dim=positions.shape[1], random_signs=True)
    given = (graph.x, graph.edge_index, graph.edge_attr)
    output = model(*given, positions=positions)
    assert not torch.allclose(output, model(*given, positions=-positions))
    torch.testing.assert_close(model(*given, positions=positions), output)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    # two to the number of columns ways to flip signs
    seen = {model(*given, positions=positions).sum().item() for _ in range(20)}
    assert 1 < len(seen) <= 2 ** positions.shape[1]
    with pytest.raises(
        ValueError, match=r"positions: expected \[nodes, position_dim\] = .*, got None"
    ):
        model(*given)


def test_kernels_and_gradients():
    model = make(readout="graph")
    batch = Batch.from_data_list(some_graphs())
    with attnkit.record_backends(model) as record:
        output = model(batch.x, batch.edge_index, batch.edge_attr, batch=batch.batch)
    assert record.counts["blocks.0.local"] == {"edges": 1}
    output.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_pooling_is_attention_over_each_graph():
    torch.manual_seed(0)
    pool = GraphPool(HIDDEN, 3).double()
    x = torch.randn(10, HIDDEN, dtype=torch.float64)
    lengths = torch.tensor([3, 0, 7])
    pooled = pool(x, lengths)
    for row, part in zip(pooled, x.split(lengths.tolist()), strict=True):
        expected = pool.attention(pool.query, part[None]) if len(part) else None
        torch.testing.assert_close(
            row, pool.attention.out_proj.bias if expected is None else expected[0, 0]
        )
    assert graph_lengths(torch.tensor([0, 0, 2])).tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local": None, "global_attention": None, "edge_dim": None}, "at least one, got None"),
        ({"local": None}, "edge_dim: only local attention reads edges, got 2"),
        ({"heads": 5}, "heads: 5 does not divide dim 12"),
        ({"readout": "graphs"}, "readout: expected 'node', 'graph' or 'edge', got 'graphs'"),
        ({"random_signs": True}, "random_signs: needs positions, but position_dim is None"),
        ({"num_layers": 0}, "num_layers: expected at least 1, got 0"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        GraphTransformer(IN, HIDDEN, CLASSES, **{"heads": 3, "edge_dim": EDGE_DIM, **options})


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        (
            [[0, 1], [2, 3], [4, 5]],
            ValueError,
            r"the shape \[2, pairs\], got \[3, 2\], transposed\?",
        ),
        ([0, 1], ValueError, r"pairs: expected the shape \[2, pairs\], got \[2\]$"),
        ([[0.0, 1.0], [2.0, 3.0]], TypeError, "pairs: expected integers .*, got torch.float32"),
        ([[True, False], [False, True]], TypeError, "pairs: expected integers .*, got torch.bool"),
        ([[0, -1], [2, 3]], IndexError, "pairs: go from -1 to 3, expected nodes 0 to 6"),
        ([[0, 1], [2, 7]], IndexError, "pairs: go from 0 to 7, expected nodes 0 to 6"),
    ],
)
def test_wrong_pairs_are_named(pairs, error, message):
    graph, model = some_graphs()[0], make(readout="edge")
    with pytest.raises(error, match=message):
        model(graph.x, graph.edge_index, graph.edge_attr, pairs=torch.tensor(pairs))


def test_wrong_inputs_are_named():
    model = make()
    x, edge_index, edge_attr = torch.zeros(3, IN).double(), torch.zeros(2, 0).long(), None
    edge_attr = torch.zeros(0, EDGE_DIM).double()
    with pytest.raises(ValueError, match="batch: expected nodes in the order of their graphs"):
        model(x, edge_index, edge_attr, batch=torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="pairs: only for the readout 'edge'"):
        model(x, edge_index, edge_attr, pairs=torch.zeros(2, 1).long())


def test_exphormer_attends_along_all_edges_with_their_types():
    """A block against PyG's `TransformerConv` on the joined graph, with the types as one-hot edge
    features."""
    torch.manual_seed(3)
    nodes = 11
    edge_index = torch.randint(nodes, (2, 23))
    options = {"num_layers": 1, "heads": 3, "global_attention": None}
    model = GraphTransformer(
        IN, HIDDEN, CLASSES, expander_degree=4, num_virtual_nodes=2, expander_seed=5, **options
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model = model.double().eval()
    layer = model.blocks[0].local
    theirs = TransformerConv(HIDDEN, HIDDEN // 3, 3, edge_dim=4, root_weight=False).double()
    for name in ("query", "key", "value"):
        ours = getattr(layer.projections.node_proj, f"{name}_proj")
        getattr(theirs, f"lin_{name}").load_state_dict(ours.state_dict())
    theirs.lin_edge.load_state_dict({"weight": layer.projections.edge_proj.weight})

    far = expander_edges(torch.tensor([nodes]), 4, 5)
    every = torch.arange(nodes)
    up = [torch.stack([every, torch.full((nodes,), nodes + number)]) for number in range(2)]
    parts = [edge_index, far, torch.cat(up, 1), torch.cat(up, 1).flip(0)]
    types = torch.cat([torch.full((part.shape[1],), kind) for kind, part in enumerate(parts)])
    features = F.one_hot(types, 4).double()

    x = torch.randn(nodes, IN, dtype=torch.float64)
    block = model.blocks[0]
    hidden = torch.cat([model.embed(x), model.virtual_nodes])
    seen = theirs(block.attention_norm(hidden), torch.cat(parts, dim=1), features)
    hidden = hidden + block.local_proj(seen + layer.out_bias)
    hidden = hidden + block.mlp(block.mlp_norm(hidden))
    expected = model.head(model.norm(hidden[:nodes]))
    torch.testing.assert_close(model(x, edge_index), expected)

    edges = attnkit.Edges(edge_index, nodes)  # sorted once
    torch.testing.assert_close(model(x, edges), expected)
    torch.testing.assert_close(model(x, edges), expected)
    other = attnkit.Edges(edge_index[:, :7], nodes)
    assert not torch.allclose(model(x, other), expected)
    torch.testing.assert_close(model(x, edges), expected)


def test_expander_edges_reach_far():
    """A chain of 40 nodes is crossed in three layers, which see three nodes without them."""
    chain = torch.stack([torch.arange(39), torch.arange(1, 40)])
    x = torch.randn(40, IN, requires_grad=True)
    for degree, num_virtual, seen in ((None, 0, 4), (6, 0, 40), (None, 1, 40)):
        torch.manual_seed(0)
        model = GraphTransformer(
            IN, HIDDEN, CLASSES, num_layers=3, heads=3, global_attention=None,
            expander_degree=degree, num_virtual_nodes=num_virtual,
        ).eval()  # fmt: skip
        (gradient,) = torch.autograd.grad(model(x, chain)[39].sum(), x)
        assert len(gradient.abs().sum(1).nonzero()) == pytest.approx(seen, abs=4 * (degree or 0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expander_degree": 3, "global_attention": None}, "^expander_degree: expected an even"),
        ({"expander_degree": 4, "local": None}, "expander_degree: .* local is None"),
        ({"num_virtual_nodes": 1}, "num_virtual_nodes: replace global_attention"),
    ],
)
def test_wrong_far_edges_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        GraphTransformer(IN, HIDDEN, CLASSES, heads=3, **options)
