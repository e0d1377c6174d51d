"""The graph transformer: graphs in a batch are each alone, and every option does something."""

import networkx
import pytest
import torch
from layer_support import assert_named
from torch.nn import functional as F
from torch_geometric.data import Batch, Data
from torch_geometric.nn import TransformerConv
from torch_geometric.transforms import AddLaplacianEigenvectorPE, AddRandomWalkPE
from torch_geometric.utils import to_networkx

import attnkit
from attnkit.models.graph_transformer import (
    GraphTransformer,
    expander_edges,
    joined_edges,
    virtual_edges,
)

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


@pytest.mark.parametrize("degree", [2, 4, 6])
def test_expander_edges_are_a_regular_connected_graph(degree):
    lengths = torch.tensor([101, 1, 3, 11])
    edges = expander_edges(lengths, degree, seed=3)
    source, target = edges
    expected = torch.full((116,), degree)
    expected[101] = 0  # alone in its graph
    assert torch.equal(target.bincount(minlength=116), expected)
    assert torch.equal(source.bincount(minlength=116), expected)
    assert (source != target).all()
    both = {tuple(edge) for edge in edges.T.tolist()}
    assert both == {edge[::-1] for edge in both}
    graph = to_networkx(Data(edge_index=edges, num_nodes=116), to_undirected=True)
    parts = sorted(map(sorted, networkx.connected_components(graph)))
    assert parts == [[*range(101)], [101], [102, 103, 104], [*range(105, 116)]]
    assert torch.equal(edges, expander_edges(lengths, degree, seed=3))
    assert not torch.equal(edges, expander_edges(lengths, degree, seed=4))


def test_expander_edges_expand():
    """The second eigenvalue of the adjacency is near 2 √(d − 1), that of the best expanders, where
    a ring with as many neighbours has nearly d."""
    degree, nodes = 6, 501
    source, target = expander_edges(torch.tensor([nodes]), degree)
    matrix = torch.zeros(nodes, nodes, dtype=torch.float64)
    matrix.index_put_((target, source), matrix.new_ones(1), accumulate=True)
    values = torch.linalg.eigvalsh(matrix)
    assert float(values[-1]) == pytest.approx(degree)
    assert max(abs(float(values[0])), float(values[-2])) < 2 * (degree - 1) ** 0.5 + 0.3 < degree


def test_virtual_nodes_are_joined_to_all_nodes_of_their_graph():
    edges = virtual_edges(torch.tensor([2, 3]), 2)
    to_virtual = [(0, 5), (1, 5), (2, 6), (3, 6), (4, 6), (0, 7), (1, 7), (2, 8), (3, 8), (4, 8)]
    assert list(map(tuple, edges.T.tolist())) == [*to_virtual, *(edge[::-1] for edge in to_virtual)]


def test_joined_edges_begin_with_the_graphs_own():
    own = torch.randint(0, 13, (2, 31))
    joined, types = joined_edges(
        attnkit.Edges(own, 13), torch.tensor([13]), degree=4, num_virtual=1, seed=2
    )
    assert torch.equal(joined.edge_index[:, :31], own)
    assert types.tolist() == [0] * 31 + [1] * 4 * 13 + [2] * 13 + [3] * 13
    assert joined.sizes == (13 + 1, 13 + 1)
    assert (joined.edge_index[1, types == 2] == 13).all()
    assert (joined.edge_index[0, types == 3] == 13).all()


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
            expander_degree=degree, num_virtual_nodes=num_virtual, backend="edges",
        ).eval()  # fmt: skip
        (gradient,) = torch.autograd.grad(model(x, chain)[39].sum(), x)
        assert len(gradient.abs().sum(1).nonzero()) == pytest.approx(seen, abs=4 * (degree or 0))


FAR = {"global_attention": None, "edge_dim": None}
WRONG = [
    ({"local": None, "global_attention": None, "edge_dim": None}, "at least one, got None"),
    ({"local": None}, "edge_dim: only local attention reads edges, got 2"),
    ({"heads": 5}, "heads: 5 does not divide dim 12"),
    ({"readout": "graphs"}, "readout: expected 'node', 'graph' or 'edge', got 'graphs'"),
    ({"random_signs": True}, "random_signs: needs positions, but position_dim is None"),
    ({"num_layers": 0}, "num_layers: expected at least 1, got 0"),
    ({"expander_degree": 3, **FAR}, "expander_degree: expected an even number .* got 3"),
    ({"expander_degree": 4, "local": None}, "expander_degree: .* local is None"),
    ({"num_virtual_nodes": 1}, "num_virtual_nodes: replace global_attention"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_options_are_named(options, message):
    options = {"heads": 3, "edge_dim": EDGE_DIM, **options}
    assert_named(lambda: GraphTransformer(IN, HIDDEN, CLASSES, **options), message)


def test_a_wrong_degree_is_named():
    with pytest.raises(ValueError, match="degree: expected an even number of at least 2, got 3"):
        expander_edges(torch.tensor([13]), 3)
