"""PyG's attention layers: equal outputs and gradients by copied weights, or a refusal; and PyG's
explainers on attnkit's models."""

from itertools import product

import pytest
import torch
from torch import nn
from torch_geometric.explain import Explainer
from torch_geometric.explain.algorithm import AttentionExplainer, GNNExplainer, PGExplainer
from torch_geometric.explain.algorithm.captum import CaptumModel
from torch_geometric.nn import GATConv, GATv2Conv, SAGEConv, TransformerConv
from torch_geometric.nn import Sequential as PyGSequential
from torch_geometric.nn import models as pyg_models

import attnkit
from attnkit import Edges, GraphAttention, interop

NODES, SOURCES, EDGE_DIM = 11, 13, 2
DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]


def graph(num_sources=NODES, num_targets=NODES, num_edges=53):
    """With self-loops, an edge given twice, and two targets without edges."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(num_sources, (num_edges,), generator=generator)
    target = torch.randint(num_targets - 2, (num_edges,), generator=generator)
    extra = torch.tensor([[3, 3, 4, 4], [3, 3, 7, 7]])
    return torch.cat([extra[:, :1], torch.stack([source, target]), extra[:, 1:]], dim=1)


def randomise(module):
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)
    return module


def options(**choices):
    """Every option changed alone, from each of two bases: the first choices, and the last."""
    names = list(choices)
    found = {}
    for base in (0, -1):
        standard = {name: values[base] for name, values in choices.items()}
        for name in names:
            for value in choices[name]:
                chosen = {**standard, name: value}
                found[str(sorted(chosen.items(), key=str))] = chosen
    return [*found.values()]


COMMON = {"heads": [3, 1], "concat": [True, False], "edge_dim": [None, EDGE_DIM],
          "bias": [True, False], "in_channels": [5, (5, 7), (7, 7)],
          "dropout": [0.0, 0.4]}  # fmt: skip
LOOPS = {"add_self_loops": [False, True], "residual": [False, True],
         "negative_slope": [0.2, 0.01]}  # fmt: skip
CASES = [
    *product([TransformerConv],
             options(**COMMON, root_weight=[True, False, True], beta=[False, True])),
    *product([GATv2Conv], options(**COMMON, **LOOPS)),
    *product([GATv2Conv], options(heads=[3], in_channels=[5, (7, 7)], share_weights=[True],
                                  edge_dim=[EDGE_DIM, None])),
    *product([GATConv], options(**COMMON, **LOOPS)),
]  # fmt: skip


def inputs_for(conv, dtype, num_sources=None):
    """Nodes, edges and what they carry; a pair of nodes where the layer is bipartite."""
    sizes = conv.in_channels
    generator = torch.Generator().manual_seed(1)

    def rand(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()

    num_sources = num_sources or (NODES if isinstance(sizes, int) else SOURCES)
    edge_index = graph(num_sources, NODES)
    if isinstance(sizes, int):
        x = [rand(NODES, sizes)]
    else:
        x = [rand(num_sources, sizes[0]), rand(NODES, sizes[1])]
    attr = None if conv.edge_dim is None else rand(edge_index.shape[1], EDGE_DIM)
    leaves = [*x, *([] if attr is None else [attr])]
    return (x[0] if len(x) == 1 else tuple(x)), edge_index, attr, leaves


def assert_equal(theirs, ours, given, leaves, atol):
    theirs.eval(), ours.eval()
    expected, actual = theirs(*given), ours(*given)
    assert expected.std() > 0.01
    torch.testing.assert_close(actual, expected, atol=atol, rtol=atol)
    towards = torch.randn(expected.shape, dtype=expected.dtype)
    gradients = torch.autograd.grad(expected, leaves, towards, retain_graph=True)
    ours_gradients = torch.autograd.grad(actual, leaves, towards, retain_graph=True)
    for mine, their in zip(ours_gradients, gradients, strict=True):
        assert their.abs().max() > 1e-3
        torch.testing.assert_close(mine, their, atol=10 * atol, rtol=10 * atol)
    (actual * towards).sum().backward(inputs=[*ours.parameters()])
    (expected * towards).sum().backward(inputs=[*theirs.parameters()])


def total(module):
    """All gradients in the order of their size: names and fusing differ."""
    gradients = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    return torch.cat(gradients).sort().values


@pytest.mark.parametrize(("dtype", "atol"), DTYPES, ids=["float64", "float32"])
@pytest.mark.parametrize(("conv", "chosen"), CASES, ids=str)
def test_equal_outputs_and_gradients(conv, chosen, dtype, atol):
    theirs = randomise(conv(out_channels=4, **chosen)).to(dtype)
    ours = interop.from_pyg(theirs)
    assert ours.dropout_p == chosen.get("dropout", 0.0)
    ours.backend = "edges"  # what large graphs run on; here others would pay
    *given, leaves = inputs_for(theirs, dtype)
    assert_equal(theirs, ours, given, leaves, atol)
    if dtype == torch.float64:
        torch.testing.assert_close(total(ours), total(theirs), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("fill_value", [2.5, "mean", "add", "min", "max", "mul", "tensor"])
@pytest.mark.parametrize("conv", [GATConv, GATv2Conv])
@pytest.mark.parametrize("in_channels", [5, (5, 7)])
def test_what_added_self_loops_carry(conv, fill_value, in_channels):
    if fill_value == "tensor":
        fill_value = torch.tensor([0.5, -2.0], dtype=torch.float64)
    theirs = conv(in_channels, 4, heads=3, edge_dim=EDGE_DIM, fill_value=fill_value)
    theirs = randomise(theirs).double()
    ours = interop.from_pyg(theirs)
    # as many sources as targets: PyG cannot make loops for a target that is not a source
    *given, leaves = inputs_for(theirs, torch.float64, num_sources=NODES)
    assert_equal(theirs, ours, given, leaves, 1e-10)


@pytest.mark.parametrize("conv", [GATConv, GATv2Conv, TransformerConv])
def test_a_layer_of_one_size_takes_sources_and_targets_too(conv):
    theirs = randomise(conv(5, 4, heads=3)).double().eval()
    ours = interop.from_pyg(theirs)
    pair = torch.randn(SOURCES, 5, dtype=torch.float64), torch.randn(NODES, 5, dtype=torch.float64)
    edge_index = graph(SOURCES, NODES)
    torch.testing.assert_close(ours(pair, edge_index), theirs(pair, edge_index))
    adjacency, x = torch.zeros(NODES, NODES), pair[1]
    adjacency[graph()[1], graph()[0]] = 1
    expected = theirs(x, graph().unique(dim=1))
    torch.testing.assert_close(ours(x, adjacency.to_sparse_csr()), expected)


@pytest.mark.parametrize("conv", [GATConv, GATv2Conv, TransformerConv])
def test_weights_are_theirs_in_the_order_of_the_edges(conv):
    theirs = randomise(conv(5, 4, heads=3)).double().eval()
    ours = interop.from_pyg(theirs)
    x, edge_index = torch.randn(NODES, 5, dtype=torch.float64), graph()
    _, (their_index, alpha) = theirs(x, edge_index, return_attention_weights=True)
    weights = ours.attention_weights(x, edge_index)
    if conv is TransformerConv:
        torch.testing.assert_close(weights, alpha)
        return
    is_loop = edge_index[0] == edge_index[1]
    assert is_loop.sum() >= 2
    assert (weights[: len(is_loop)][is_loop] == 0).all()
    torch.testing.assert_close(weights[: len(is_loop)][~is_loop], alpha[: (~is_loop).sum()])
    torch.testing.assert_close(weights[len(is_loop) :], alpha[(~is_loop).sum() :])
    assert (their_index[0, -NODES:] == torch.arange(NODES)).all()


def alter(conv, change):
    change(conv)
    return conv


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: None, "or a model with one, got NoneType"),
        (lambda: nn.Linear(3, 3), "or a model with one, got Linear"),
        (lambda: SAGEConv(3, 3), "got SAGEConv"),
        (lambda: type("Mine", (GATConv,), {})(3, 3), "itself or .*got Mine"),
        (lambda: GATConv(3, 3, aggr="mean"), "aggr='mean'"),
        (lambda: GATv2Conv(3, 3, flow="target_to_source"), "flow='target_to_source'"),
        (lambda: TransformerConv(-1, 3), "lazy channels"),
        (lambda: alter(GATConv(3, 3), lambda c: c.register_forward_hook(print)), "hooks"),
        (lambda: alter(GATConv(3, 3), lambda c: c.register_message_forward_hook(print)), "hooks"),
        (lambda: alter(GATConv(3, 3), lambda c: setattr(c, "explain", True)), "masks of an expl"),
        (lambda: GATConv(3, 3, negative_slope=-1.0), "negative_slope: expected at least 0"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(make, reason):
    with pytest.raises((ValueError, TypeError), match=reason):
        interop.from_pyg(make())


def test_lazy_layers_are_carried_over_once_they_have_seen_an_input():
    theirs, x = GATConv(-1, 4, heads=3), torch.randn(NODES, 5)
    theirs(x, graph())
    ours = interop.from_pyg(theirs)
    torch.testing.assert_close(ours(x, graph()), theirs(x, graph()))
    assert ours.training


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("options", [{}, {"edge_dim": EDGE_DIM, "jk": "lstm", "norm": "batch"}])
def test_every_layer_of_a_model(v2, options):
    theirs = randomise(pyg_models.GAT(5, 8, 3, 4, heads=2, v2=v2, dropout=0.3, **options)).double()
    ours = interop.from_pyg(theirs)
    assert [type(conv) for conv in ours.convs] == [GraphAttention] * 3
    assert type(theirs.convs[0]) is (GATv2Conv if v2 else GATConv)
    x = torch.randn(NODES, 5, dtype=torch.float64, requires_grad=True)
    edge_attr = torch.randn(len(graph()[0]), EDGE_DIM, dtype=torch.float64)
    kwargs = {"edge_attr": edge_attr} if options else {}
    theirs.eval(), ours.eval()
    expected, actual = (model(x, graph(), **kwargs) for model in (theirs, ours))
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (actual, expected)]
    torch.testing.assert_close(*gradients)


def test_a_layer_that_a_model_has_twice_stays_one():
    conv = GATConv(5, 5)
    ours = interop.from_pyg(nn.ModuleList([conv, nn.Sequential(conv, nn.Dropout())]))
    assert ours[0] is ours[1][0]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("in_channels", [5, (5, 7)])
def test_gat_with_sources_alone(in_channels, residual):
    theirs = randomise(GATConv(in_channels, 4, heads=2, residual=residual)).double()
    ours = interop.from_pyg(theirs)
    x, edge_index = (torch.randn(SOURCES, 5, dtype=torch.float64), None), graph(SOURCES, NODES)
    size = SOURCES, NODES
    torch.testing.assert_close(ours(x, edge_index, size=size), theirs(x, edge_index, size=size))
    edges = Edges(edge_index, size)
    torch.testing.assert_close(ours(x, edges), theirs(x, edge_index, size=size))


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_csr])
@pytest.mark.parametrize("conv", [GATConv, GATv2Conv, TransformerConv])
def test_weights_are_returned_as_theirs(conv, layout):
    theirs = randomise(conv(5, 4, heads=3)).double().eval()
    ours = interop.from_pyg(theirs)
    x, edge_index = torch.randn(NODES, 5, dtype=torch.float64), graph().unique(dim=1)
    given = edge_index
    if layout is not torch.strided:
        if conv is TransformerConv:
            return  # PyG's fails
        given = torch.zeros(NODES, NODES).index_put((edge_index[1], edge_index[0]), torch.ones(()))
        given = given.to_sparse_csr()
    expected, (their_edges, alpha) = theirs(x, given, return_attention_weights=True)
    output, (our_edges, weights) = ours(x, given, return_attention_weights=True)
    torch.testing.assert_close(output, expected)
    if layout is torch.strided:
        assert torch.equal(our_edges, their_edges)
        torch.testing.assert_close(weights, alpha)
    else:
        assert our_edges.shape == their_edges.shape
        torch.testing.assert_close(our_edges.to_dense(), their_edges.to_dense())


# Explainers


def explained(model, algorithm, index=2, x=None, edge_attr=None, **options):
    explainer = Explainer(
        model,
        algorithm=algorithm,
        explanation_type="model",
        model_config={"mode": "multiclass_classification", "task_level": "node",
                      "return_type": "raw"},
        **options,
    )  # fmt: skip
    x = torch.randn(NODES, 5) if x is None else x
    given = {} if edge_attr is None else {"edge_attr": edge_attr}
    return explainer(x, graph(), index=index, **given)


class Net(nn.Module):
    def __init__(self, edge_dim=None, **options):
        super().__init__()
        self.first = GraphAttention(5, 4, heads=3, edge_dim=edge_dim, **options)
        self.second = GraphAttention(12, 3, concat=False, edge_dim=edge_dim, **options)

    def forward(self, x, edge_index, edge_attr=None):
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


@pytest.mark.parametrize("score", ["scaled_dot", "gat", "gatv2"])
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
def test_the_explainable_copy_is_the_same_model(score, loops, edge_dim):
    model = randomise(Net(edge_dim, score=score, add_self_loops=loops)).eval()
    copy = interop.explainable(model)
    attr = None if edge_dim is None else torch.randn(graph().shape[1], edge_dim)
    given = torch.randn(NODES, 5), graph(), attr
    torch.testing.assert_close(copy(*given), model(*given))
    assert type(model.first) is GraphAttention
    assert copy.first.projections is not model.first.projections
    assert all(a is b for a, b in zip(copy.parameters(), model.parameters(), strict=True))
    assert copy.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_explainable_copy_of_a_node_without_edges_of_weight(dtype, loops):
    """All edges into node 2 have the weight 0, and so the bias −∞."""
    model = randomise(GraphAttention(5, 3, 2, add_self_loops=loops)).to(dtype).eval()
    bias = (graph()[1] != 2).to(dtype).log()
    x = torch.randn(NODES, 5, dtype=dtype)
    output = interop.explainable(model)(x, graph(), edge_bias=bias)
    torch.testing.assert_close(output, model(x, graph(), edge_bias=bias))
    assert output.isfinite().all()


@pytest.mark.parametrize("loops", [False, True])
def test_gnn_explainer_masks_edges_and_features(loops):
    model = randomise(Net(score="gatv2", add_self_loops=loops)).eval()
    explanation = explained(
        interop.explainable(model), GNNExplainer(epochs=20), edge_mask_type="object",
        node_mask_type="attributes",
    )  # fmt: skip
    assert explanation.edge_mask.shape == (graph().shape[1],)
    assert explanation.node_mask.shape == (NODES, 5)
    # what cannot reach node 2 within two layers is 0, and what can is not
    near = graph()[0][graph()[1] == 2]
    reaches = (graph()[1] == 2) | torch.isin(graph()[1], near)
    if loops:  # the layer's own loops, which are not explained, replace these
        reaches &= graph()[0] != graph()[1]
    assert (explanation.edge_mask[~reaches] == 0).all()
    assert (explanation.edge_mask[reaches] > 0).all()
    # nothing of the explainer stays behind
    x = torch.randn(NODES, 5)
    torch.testing.assert_close(interop.explainable(model)(x, graph()), model(x, graph()))


@pytest.mark.parametrize("loops", [False, True])
def test_attention_explainer_reports_the_right_edges(loops):
    model = randomise(Net(score="gat", add_self_loops=loops)).eval()
    x = torch.randn(NODES, 5)
    explanation = explained(
        interop.explainable(model), AttentionExplainer("max"), x=x, edge_mask_type="object"
    )
    with attnkit.capture_attention(model) as weights:
        model(x, graph())
    layers = [weights[name][0][: graph().shape[1]].amax(dim=1) for name in ("first", "second")]
    expected = torch.stack(layers).amax(dim=0)
    reached = explanation.edge_mask > 0
    assert reached.any()
    torch.testing.assert_close(explanation.edge_mask[reached], expected[reached])


def test_pg_explainer_trains_on_edges():
    model = interop.explainable(randomise(GraphAttention(5, 3, 2, concat=False)).eval())
    x, target = torch.randn(NODES, 5), torch.arange(NODES) % 3
    explainer = Explainer(
        model, PGExplainer(epochs=2), explanation_type="phenomenon", edge_mask_type="object",
        model_config={"mode": "multiclass_classification", "task_level": "node",
                      "return_type": "raw"},
    )  # fmt: skip
    states = []
    for epoch in range(2):
        explainer.algorithm.train(epoch, model, x, graph(), target=target, index=2)
        states.append([p.clone() for p in explainer.algorithm.mlp.parameters()])
    assert any(not torch.equal(p, b) for p, b in zip(*states, strict=True))
    mask = explainer(x, graph(), target=target, index=2).edge_mask
    near = graph()[0][graph()[1] == 2]  # all that one layer reaches
    far = ~torch.isin(graph(), torch.cat([near, torch.tensor([2])])).all(dim=0)
    assert far.any()
    assert (mask[far] == 0).all()
    assert (mask[~far] > 0).all()


def test_masks_of_edges_as_captum_sets_them():
    """`CaptumExplainer` differentiates this wrapper of PyG's; captum itself is not asked for."""
    model = randomise(Net(score="gat", add_self_loops=True)).double().eval()
    x, edge_index = torch.randn(NODES, 5, dtype=torch.float64), graph()
    wrapped = CaptumModel(interop.explainable(model), "edge")
    ones = torch.ones(1, edge_index.shape[1], dtype=torch.float64, requires_grad=True)
    output = wrapped(ones, x, edge_index)
    torch.testing.assert_close(output, model(x, edge_index))
    (gradient,) = torch.autograd.grad(output[2].sum(), ones)
    is_loop = edge_index[0] == edge_index[1]
    assert (gradient[0, is_loop] == 0).all()
    assert (gradient[0, (edge_index[1] == 2) & ~is_loop] != 0).all()
    # a mask of 0 takes the message away
    none = wrapped(torch.zeros_like(ones), x, edge_index)
    assert not torch.allclose(none, output)


def test_a_model_without_graph_attention_cannot_be_explained():
    with pytest.raises(ValueError, match="model: Linear has no GraphAttention"):
        interop.explainable(nn.Linear(3, 3))


def test_in_pygs_sequential_with_its_data():
    from torch_geometric.data import Batch, Data

    model = PyGSequential("x, edge_index, edge_attr", [
        (GraphAttention(5, 4, 3, edge_dim=EDGE_DIM), "x, edge_index, edge_attr -> x"),
        nn.ELU(),
        (GraphAttention(12, 3, score="gatv2"), "x, edge_index -> x"),
    ])  # fmt: skip
    graphs = [
        Data(torch.randn(NODES, 5), graph(num_edges=count),
             edge_attr=torch.randn(count + 4, EDGE_DIM))
        for count in (17, 29)
    ]  # fmt: skip
    batch = Batch.from_data_list(graphs)
    together = model(batch.x, batch.edge_index, batch.edge_attr)
    apart = [model(data.x, data.edge_index, data.edge_attr) for data in graphs]
    torch.testing.assert_close(together, torch.cat(apart), atol=1e-5, rtol=1e-5)
    edges = Edges(batch.edge_index, batch.num_nodes)
    torch.testing.assert_close(model(batch.x, edges, batch.edge_attr), together)
