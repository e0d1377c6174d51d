"""PyG's layers for heterogeneous graphs: equal outputs and gradients by copied weights."""

from itertools import product

import pytest
import torch
from torch import nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import HANConv, HGTConv, RGATConv
from torch_geometric.nn import Sequential as PyGSequential

import attnkit
from attnkit import TypedEdges, interop

SIZES = {"paper": (11, 5), "author": (7, 12), "venue": (3, 2)}
EDGES = {
    ("paper", "cites", "paper"): 41,
    ("author", "writes", "paper"): 29,
    ("paper", "written_by", "author"): 23,
    ("venue", "prints", "paper"): 2,
    ("paper", "odd", "author"): 0,
}
METADATA = [*SIZES], [*EDGES]
DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
ADDITIVE, MULTIPLICATIVE = "additive-self-attention", "multiplicative-self-attention"


def graph(dtype=torch.float64):
    """With an edge given twice, and nodes without edges."""
    generator = torch.Generator().manual_seed(0)
    x_dict = {
        name: torch.randn(*size, dtype=torch.float64, generator=generator).to(dtype)
        for name, size in SIZES.items()
    }
    edge_index_dict = {}
    for key, count in EDGES.items():
        ends = [SIZES[key[0]][0], max(1, SIZES[key[2]][0] - 2)]
        rows = [torch.randint(end, (count,), generator=generator) for end in ends]
        edges = torch.stack(rows)
        edge_index_dict[key] = torch.cat([edges, edges[:, :1]], dim=1)
    return {name: x.requires_grad_() for name, x in x_dict.items()}, edge_index_dict


def randomised(module, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)
    return module.to(dtype).eval()


def as_one(output):
    if isinstance(output, torch.Tensor):
        return output
    return torch.cat([nodes for nodes in output.values() if nodes is not None])


def assert_equal(theirs, ours, theirs_given, ours_given, leaves, atol):
    expected, actual = theirs(*theirs_given), ours(*ours_given)
    if isinstance(expected, dict):
        assert {name: x is None for name, x in actual.items()} == {
            name: x is None for name, x in expected.items()
        }
    expected, actual = as_one(expected), as_one(actual)
    assert expected.std() > 0.01
    torch.testing.assert_close(actual, expected, atol=atol, rtol=atol)
    towards = torch.randn(expected.shape, dtype=expected.dtype)
    gradients = []
    size = sum(p.numel() for module in (theirs, ours) for p in module.parameters())
    for module, output in ((theirs, expected), (ours, actual)):
        module.zero_grad()
        (output * towards).sum().backward(inputs=[*leaves, *module.parameters()])
        found = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
        # in the order of their size, since names differ, and zeros stand for what is not used
        found = torch.cat([*found, found[0].new_zeros(size - sum(map(len, found)))])
        gradients.append([*(leaf.grad for leaf in leaves), found.sort().values])
        for leaf in leaves:
            leaf.grad = None
    for mine, their in zip(gradients[1], gradients[0], strict=True):
        assert their.abs().max() > 1e-3
        torch.testing.assert_close(mine, their, atol=10 * atol, rtol=10 * atol)


@pytest.mark.parametrize(("dtype", "atol"), DTYPES, ids=["float64", "float32"])
@pytest.mark.parametrize("heads", [3, 1])
@pytest.mark.parametrize("kind", [HGTConv, HANConv])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_typed_nodes(kind, heads, is_prepared, dtype, atol):
    sizes = {name: channels for name, (_, channels) in SIZES.items()}
    options = {"negative_slope": 0.1} if kind is HANConv else {}
    theirs = randomised(kind(sizes, 12, METADATA, heads, **options), dtype)
    ours = interop.from_pyg(theirs)
    ours.backend = "edges"
    x_dict, edge_index_dict = graph(dtype)
    edges = edge_index_dict
    if is_prepared:
        edges = TypedEdges(edge_index_dict, {name: len(x) for name, x in x_dict.items()})
    given = (x_dict, edge_index_dict), (x_dict, edges)
    # what gets no edges tells HAN's venues nothing
    leaves = [x_dict[name] for name in ("paper", "author", "venue")]
    assert_equal(theirs, ours, *given, leaves, atol)


RELATIONAL = [
    {"attention_mode": mode, "dim": dim, "attention_mechanism": mechanism, "heads": heads,
     "concat": concat, "edge_dim": edge_dim}
    for (mode, dim), mechanism, (heads, concat, edge_dim) in product(
        [(ADDITIVE, 1), (MULTIPLICATIVE, 1), (MULTIPLICATIVE, 2)],
        ["across-relation", "within-relation"],
        [(3, True, None), (3, False, 2), (1, True, 2)],
    )
] + [{"num_bases": 2, "heads": 2}, {"num_blocks": 3, "heads": 3}, {"bias": False},
     {"negative_slope": 0.01, "heads": 2}]  # fmt: skip


@pytest.mark.parametrize(("dtype", "atol"), DTYPES, ids=["float64", "float32"])
@pytest.mark.parametrize("options", RELATIONAL, ids=str)
def test_relations(options, dtype, atol):
    theirs = randomised(RGATConv(6, 4, 5, **options), dtype)
    ours = interop.from_pyg(theirs)
    ours.backend = "edges"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    edge_index = torch.randint(11, (2, 53), generator=generator)
    edge_type = torch.randint(4, (53,), generator=generator)  # none of the last relation
    given = [x, edge_index, edge_type]
    if options.get("edge_dim"):
        attr = torch.randn(53, 2, generator=generator, dtype=torch.float64)
        given.append(attr.to(dtype).requires_grad_())
    leaves = [tensor for tensor in given if tensor.requires_grad]
    assert_equal(theirs, ours, given, given, leaves, atol)
    carried = dict(zip(["edge_attr"], given[3:], strict=False))
    prepared = TypedEdges(edge_index, 11, edge_type, 5)
    torch.testing.assert_close(ours(x, prepared, **carried), ours(*given))
    _, (where, alpha) = theirs(*given, return_attention_weights=True)
    _, (edges, weights) = ours(*given, return_attention_weights=True)
    assert torch.equal(edges, where)
    torch.testing.assert_close(weights, alpha, atol=atol, rtol=atol)
    torch.testing.assert_close(ours.attention_weights(*given), weights)


@pytest.mark.parametrize("kind", [HGTConv, HANConv])
def test_sparse_matrices(kind):
    x_dict, edge_index_dict = graph()
    theirs = randomised(kind({name: c for name, (_, c) in SIZES.items()}, 12, METADATA, heads=3))
    matrices = {}
    for key, (source, target) in edge_index_dict.items():
        dense = torch.zeros(SIZES[key[2]][0], SIZES[key[0]][0])
        dense[target, source] = 1
        matrices[key] = dense.to_sparse_csr()
    expected = theirs(x_dict, matrices)
    actual = interop.from_pyg(theirs)(x_dict, matrices)
    torch.testing.assert_close(as_one(actual), as_one(expected))


def test_semantic_attention_weights():
    x_dict, edge_index_dict = graph()
    sizes = {name: channels for name, (_, channels) in SIZES.items()}
    theirs = randomised(HANConv(sizes, 12, METADATA, heads=3))
    given = x_dict, edge_index_dict, True
    (expected, of_theirs), (actual, of_ours) = theirs(*given), interop.from_pyg(theirs)(*given)
    torch.testing.assert_close(as_one(actual), as_one(expected))
    assert of_theirs.keys() == of_ours.keys()
    assert of_theirs["venue"] is of_ours["venue"] is None
    torch.testing.assert_close(of_ours["paper"], of_theirs["paper"].flatten())


def test_whole_models_and_graphs_as_pyg_has_them():
    data = HeteroData()
    x_dict, edge_index_dict = graph()
    for name, x in x_dict.items():
        data[name].x = x
    for key, edge_index in edge_index_dict.items():
        data[key].edge_index = edge_index
    theirs = PyGSequential("x, edges", [
        (HGTConv(-1, 12, data.metadata(), heads=3), "x, edges -> x"),
        (HANConv(12, 6, data.metadata(), heads=2), "x, edges -> x"),
    ]).double()  # fmt: skip
    edges = {key: value for key, value in edge_index_dict.items() if key[0] != "venue"}
    theirs(data.x_dict, edges)
    theirs = randomised(theirs)
    ours = interop.from_pyg(theirs)
    assert [type(module).__name__ for module in ours.children()] == ["HGTAttention", "HANAttention"]
    expected = theirs(data.x_dict, edges)
    torch.testing.assert_close(as_one(ours(data.x_dict, edges)), as_one(expected))
    prepared = TypedEdges(data.edge_index_dict, data.num_nodes_dict)
    assert prepared.nodes["author"] == slice(11, 18)
    one = data.to_homogeneous(add_node_type=False)
    relational = attnkit.RGATAttention(4, 3, len(EDGES))
    output = relational(torch.randn(one.num_nodes, 4), one.edge_index, one.edge_type)
    assert output.shape == (21, 3)
    assert torch.equal(prepared.edge_index, one.edge_index)
    assert torch.equal(prepared.edge_type, one.edge_type)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: HGTConv(-1, 12, METADATA), "lazy channels"),
        (lambda: HANConv(5, 12, METADATA, flow="target_to_source"), "flow='target_to_source'"),
        (lambda: RGATConv(6, 4, 5, mod="additive"), "mod='additive'"),
        (lambda: nn.Sequential(type("Mine", (HGTConv,), {})(5, 12, METADATA)), "or a model with"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(make, reason):
    with pytest.raises((ValueError, TypeError), match=reason):
        interop.from_pyg(make())
