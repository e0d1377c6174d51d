"""Edges between far nodes, and layers that see all nodes or weigh neighbours alike."""

import networkx
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.nn.attention import SGFormerAttention
from torch_geometric.utils import to_networkx

from attnkit import Edges
from attnkit.models.graph_transformer import expander_edges, joined_edges, virtual_edges
from attnkit.models.sgformer import GraphConvolution, SimpleGlobalAttention

NODES, CHANNELS, WIDTH, HEADS = 13, 5, 7, 3


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
    own = torch.randint(0, NODES, (2, 31))
    joined, types = joined_edges(
        Edges(own, NODES), torch.tensor([NODES]), degree=4, num_virtual=1, seed=2
    )
    assert torch.equal(joined.edge_index[:, :31], own)
    assert types.tolist() == [0] * 31 + [1] * 4 * NODES + [2] * NODES + [3] * NODES
    assert joined.sizes == (NODES + 1, NODES + 1)
    assert (joined.edge_index[1, types == 2] == NODES).all()
    assert (joined.edge_index[0, types == 3] == NODES).all()
    with pytest.raises(ValueError, match="degree: expected an even number of at least 2, got 3"):
        expander_edges(torch.tensor([NODES]), 3)


def both_ways(module, other, *inputs):
    """Outputs and gradients of two modules of one x."""
    for call in (module, other):
        x = inputs[0].clone().requires_grad_()
        output = call(x, *inputs[1:])
        yield output.detach(), torch.autograd.grad(output.square().sum(), x)[0]


def test_equal_scores_make_pygs_convolution():
    torch.manual_seed(1)
    edge_index = torch.randint(0, NODES, (2, 41)).unique(dim=1)
    assert (edge_index[0] == edge_index[1]).any()
    theirs = GCNConv(CHANNELS, WIDTH).double()
    torch.nn.init.normal_(theirs.bias)
    ours = GraphConvolution(CHANNELS, WIDTH).double()
    ours.load_state_dict({"proj.weight": theirs.lin.weight, "bias": theirs.bias})
    x = torch.randn(NODES, CHANNELS, dtype=torch.float64)
    found = both_ways(
        lambda x: ours(x, Edges(edge_index, NODES)), lambda x: theirs(x, edge_index), x
    )
    torch.testing.assert_close(*found)


def test_global_attention_is_pygs_and_its_weights_say_how():
    torch.manual_seed(2)
    theirs = SGFormerAttention(CHANNELS * HEADS, HEADS, WIDTH)  # in float32 only
    ours = SimpleGlobalAttention(CHANNELS * HEADS, WIDTH, HEADS)
    ours.load_state_dict({
        f"{name}_proj.weight": getattr(theirs, name[0]).weight
        for name in ("query", "key", "value")
    })  # fmt: skip
    x = torch.randn(NODES, CHANNELS * HEADS)
    torch.testing.assert_close(*both_ways(ours, lambda x: theirs(x[None])[0], x))
    weights = ours.attention_weights(x)
    value = ours.value_proj(x).unflatten(1, (HEADS, WIDTH)).transpose(0, 1)
    torch.testing.assert_close((weights @ value).mean(dim=0), ours(x))
    torch.testing.assert_close(weights.sum(dim=2), torch.ones_like(weights[..., 0]))
    chosen = ours.attention_weights(x, rows=[4, 0], heads=1)
    torch.testing.assert_close(chosen, weights[1:2, [4, 0]])
    of_graphs = ours.attention_weights(x, torch.tensor([5, 0, 8]))
    torch.testing.assert_close(of_graphs[:, 5:, 5:], ours.attention_weights(x[5:]))
    assert (of_graphs[:, :5, 5:] == 0).all()
    output = ours(x, torch.tensor([5, 0, 8]))
    torch.testing.assert_close((of_graphs @ value).mean(dim=0), output)
