"""Graph attention: dense attention on the complete graph, the definition, invariances, what it is
given, and what it refuses; parity with PyG's layers is in test_interop_pyg."""

import pytest
import torch
from layer_support import assert_named, assert_same
from torch import nn

import attnkit
from attnkit import Edges, GraphAttention, MultiHeadAttention, ScaledDot
from attnkit.core.masks.edges import in_callers_order

NODES, SOURCES, CHANNELS, EDGE_DIM, HEADS = 11, 13, 5, 2, 3
SCORES = ["scaled_dot", "dot", "general", "cosine", "gaussian", "additive", "gatv2", "gat"]
WITH_EDGES = ["scaled_dot", "general", "additive", "gatv2", "gat"]


def graph(num_sources=NODES, num_targets=NODES, num_edges=41):
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(num_sources, (num_edges,), generator=generator)
    target = torch.randint(num_targets - 2, (num_edges,), generator=generator)
    return torch.stack([source, target])  # the last two targets have no edges


def make(score="scaled_dot", in_channels=CHANNELS, out_channels=4, heads=HEADS, **options):
    layer = GraphAttention(in_channels, out_channels, heads, score=score, **options).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator).double()
    return layer


def rand(*shape, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("score", ["scaled_dot", "general", "cosine", "gaussian", "additive"])
@pytest.mark.parametrize("backend", ["auto", "edges"])
def test_on_the_complete_graph_it_is_dense_attention(score, backend):
    layer = make(score, out_bias=False, backend=backend)
    dense = MultiHeadAttention(CHANNELS, HEADS, head_dim=4, score=score).double()
    state = layer.state_dict()
    for kind in ("weight", "bias"):
        parts = [state[f"projections.node_proj.{n}_proj.{kind}"] for n in ("query", "key", "value")]
        getattr(dense.in_proj, kind).data = torch.cat(parts)
    if isinstance(dense.score, nn.Module):
        dense.score.load_state_dict(layer.projections.score.state_dict())
    dense.out_proj = nn.Identity()
    x = rand(NODES, CHANNELS)
    complete = torch.cartesian_prod(torch.arange(NODES), torch.arange(NODES)).T
    shuffled = complete[:, torch.randperm(NODES * NODES)]
    proj, scores = layer.projections.node_proj, [dense.score, layer.projections.score]
    parts = [proj.query_proj, proj.key_proj, proj.value_proj]
    expected, actual = dense(x[None])[0], layer(x, shuffled)
    theirs, ours = ([*s.parameters()] if isinstance(s, nn.Module) else [] for s in scores)
    assert_same(actual, expected, [x, *ours], [x, *theirs], rtol=1e-6, atol=1e-6)
    towards = torch.randn_like(expected)
    for kind in ("weight", "bias"):
        own = torch.autograd.grad(layer(x, shuffled), [getattr(p, kind) for p in parts], towards)
        (other,) = torch.autograd.grad(dense(x[None])[0], getattr(dense.in_proj, kind), towards)
        torch.testing.assert_close(torch.cat(own), other, atol=1e-6, rtol=1e-6)
    weights = torch.empty(NODES, NODES, HEADS, dtype=torch.float64)
    weights[shuffled[1], shuffled[0]] = layer.attention_weights(x, shuffled)
    torch.testing.assert_close(weights.permute(2, 0, 1), dense.attention_weights(x[None])[0])


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("loops", [False, True], ids=["", "loops"])
def test_the_output_is_what_the_weights_say(score, loops):
    """Σ weight (value + W_e e), from the layer's own weights, written plainly."""
    edge_dim = EDGE_DIM if score in WITH_EDGES else None
    layer = make(score, edge_dim=edge_dim, add_self_loops=loops, out_bias=False)
    x, edge_index = rand(NODES, CHANNELS), graph()
    attr = None if edge_dim is None else rand(edge_index.shape[1], EDGE_DIM, seed=3)
    weights = layer.attention_weights(x, edge_index, attr)
    assert weights.shape == (edge_index.shape[1] + NODES * loops, HEADS)
    nodes = torch.arange(NODES)
    source, target = torch.cat([edge_index, nodes.expand(2, -1)], 1) if loops else edge_index
    sums = torch.zeros(NODES, HEADS, dtype=torch.float64).index_add(0, target, weights)
    has_edges = torch.isin(nodes, target)
    assert has_edges.all() == loops
    torch.testing.assert_close(sums, has_edges.double()[:, None].expand(-1, HEADS))
    value = layer.projections(x, x).value.transpose(0, 1)[source]
    if score in ("scaled_dot", "general", "additive"):
        carried = attr
        if loops:  # the mean of the node's other edges
            proper = edge_index[0] != edge_index[1]
            count = torch.zeros(NODES).index_add(0, edge_index[1][proper], torch.ones(proper.sum()))
            sums = torch.zeros(NODES, EDGE_DIM, dtype=torch.float64)
            sums = sums.index_add(0, edge_index[1][proper], attr[proper])
            carried = torch.cat([attr, sums / count.clamp(min=1)[:, None]])
        value = value + layer.projections.edge_proj(carried).unflatten(1, (HEADS, -1))
    expected = torch.zeros(NODES, HEADS, 4, dtype=torch.float64)
    expected = expected.index_add(0, target, weights[..., None] * value).flatten(1)
    torch.testing.assert_close(layer(x, edge_index, attr), expected)


@pytest.mark.parametrize("score", SCORES)
def test_every_parameter_counts_and_the_order_of_nodes_and_edges_does_not(score):
    edge_dim = EDGE_DIM if score in WITH_EDGES else None
    layer = make(score, edge_dim=edge_dim, residual=True, gate=True, add_self_loops=True)
    x, attr, edge_index = rand(NODES, CHANNELS), rand(41, EDGE_DIM), graph()
    layer(x, edge_index, attr if edge_dim else None).square().sum().backward()
    for name, parameter in [*layer.named_parameters(), ("x", x)]:
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    layer = make(score, edge_dim=edge_dim, residual=True)
    nodes, edges = torch.randperm(NODES), torch.randperm(41)
    moved = nodes.argsort()[edge_index][:, edges]
    given = (attr, attr[edges]) if edge_dim else (None, None)
    output = layer(x, edge_index, given[0])
    torch.testing.assert_close(layer(x[nodes], moved, given[1]), output[nodes])
    weights = layer.attention_weights(x, edge_index, given[0])
    torch.testing.assert_close(layer.attention_weights(x[nodes], moved, given[1]), weights[edges])


@pytest.mark.parametrize("score", SCORES)
def test_without_edges(score):
    for options in ({}, {"residual": True}, {"separate_self": True}):
        layer = make(score, **options)
        x = rand(NODES, CHANNELS)
        output = layer(x, torch.empty(2, 0, dtype=torch.long))
        assert (output.shape[1] == 24) == ("separate_self" in options)
        head = output[:, -12:]
        root = layer.residual_proj(x) if "residual" in options else layer.out_bias[-12:]
        torch.testing.assert_close(head, root.expand_as(head))
        output.square().sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
        assert layer.attention_weights(x, torch.empty(2, 0, dtype=torch.long)).shape == (0, HEADS)


@pytest.mark.parametrize("score", ["scaled_dot", "gatv2", "gat"])
@pytest.mark.parametrize("concat", [True, False])
def test_a_node_apart_from_its_neighbours(score, concat):
    apart = make(score, separate_self=True, concat=concat, out_bias=False)
    plain = make(score, concat=concat, out_bias=False)
    plain.load_state_dict(apart.state_dict())
    x = rand(NODES, CHANNELS)
    own, gathered = apart(x, graph()).chunk(2, dim=1)
    torch.testing.assert_close(gathered, plain(x, graph()))
    # the own value is what a node gathers that sees itself alone
    alone = plain(x, torch.arange(NODES).expand(2, -1))
    torch.testing.assert_close(own, alone)
    # and also where targets are another tensor
    other = rand(NODES, CHANNELS, seed=9)
    torch.testing.assert_close(apart((other, x), graph())[:, : own.shape[1]], own)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("in_channels", [CHANNELS, (7, CHANNELS)], ids=str)
def test_from_sources_to_targets(score, in_channels):
    layer = make(score, in_channels, bias=True)
    size = in_channels if isinstance(in_channels, int) else in_channels[0]
    pair = rand(SOURCES, size), rand(NODES, CHANNELS, seed=5)
    edge_index = graph(SOURCES, NODES)
    output = layer(pair, edge_index)
    assert output.shape == (NODES, 12)
    if isinstance(in_channels, int):  # one graph of both, whose edges go one way
        x = torch.cat(pair)
        together = edge_index + torch.tensor([[0], [SOURCES]])
        torch.testing.assert_close(layer(x, together)[SOURCES:], output)
    else:
        assert torch.autograd.grad(output.sum(), pair[0])[0].abs().max() > 0


@pytest.mark.parametrize("score", ["scaled_dot", "gatv2", "gat"])
def test_forms_of_nodes_and_edges(score):
    from torch_geometric import EdgeIndex

    layer = make(score, residual=True, add_self_loops=True)
    x, index = rand(NODES, CHANNELS), graph().unique(dim=1)
    x.data[x > 0.5] = 0
    expected = layer(x, index)
    adjacency = torch.zeros(NODES, NODES)
    adjacency[index[1], index[0]] = 1
    edges = Edges(index, NODES)
    for given in (edges, EdgeIndex(index.contiguous()), adjacency.to_sparse(), index.int(),
                  adjacency.to_sparse_csr()):  # fmt: skip
        torch.testing.assert_close(layer(x, given), expected)
    sparse = x.detach().to_sparse_csr()
    assert_same(layer(sparse, edges), layer(x, index), [*layer.parameters()], None, 1e-7, 1e-7)


def test_edges_that_are_given_are_sorted_once():
    edges = Edges(graph(), NODES)
    layers = [make("gat", add_self_loops=True), make("scaled_dot", add_self_loops=True)]
    for layer in layers:
        layer(rand(NODES, CHANNELS), edges)
    looped = edges.with_loops
    sorted_once = looped.adjacency
    layers[0](rand(NODES, CHANNELS), edges)
    assert edges.with_loops is looped
    assert edges.with_loops.adjacency is sorted_once
    assert looped.num_edges == (graph()[0] != graph()[1]).sum() + NODES


def test_rows_in_the_callers_order():
    edges = Edges(torch.tensor([[1, 2, 0, 1, 0], [1, 0, 0, 2, 0]]), 3)
    rows = torch.tensor([10.0, 20.0, 1.0, 2.0, 3.0])  # 2→0, 1→2, and the loops of 0, 1, 2
    ordered = in_callers_order(rows[:, None], edges.with_loops).squeeze(1)
    assert ordered.tolist() == [0, 10, 0, 20, 0, 1, 2, 3]


def test_captured_weights_and_the_kernel_that_ran():
    model = nn.Module()
    model.first, model.second = make("gatv2"), make("gat", 12)
    x, edges = rand(NODES, CHANNELS), Edges(graph(), NODES)
    with attnkit.record_backends(model) as record, attnkit.capture_attention(model) as weights:
        hidden = model.first(x, edges)
        model.second(hidden, edges)
    assert list(weights) == ["first", "second"]
    torch.testing.assert_close(weights["second"][0], model.second.attention_weights(hidden, edges))
    assert set(record.counts) == {"first", "second"}
    with attnkit.capture_attention(model, "first", rows=[2, -1], heads=1) as some:
        model.first(x, edges)
    torch.testing.assert_close(some["first"][0], weights["first"][0][[2, -1]][:, 1:2])
    large = Edges(torch.randint(997, (2, 3001)), 997)
    with attnkit.record_backends() as record:
        model.first(rand(997, CHANNELS), large)
    assert record.total() == {"edges": 1}


def test_dropout_of_the_weights_in_training_only():
    layer = make("gat", dropout_p=0.5, backend="edges")
    x, edges = rand(NODES, CHANNELS), Edges(graph(), NODES)
    assert not torch.equal(layer(x, edges), layer(x, edges))
    layer.eval()
    torch.testing.assert_close(layer(x, edges), layer(x, edges))
    undropped = make("gat")
    torch.testing.assert_close(layer(x, edges), undropped(x, edges))
    layer.train()
    torch.testing.assert_close(layer.attention_weights(x, edges),
                               undropped.attention_weights(x, edges))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("score", ["scaled_dot", "gat"])
def test_autocast_compile_and_export_of_the_state(score):
    options = {"edge_dim": EDGE_DIM, "add_self_loops": True, "residual": True}
    layer, again = (GraphAttention(CHANNELS, 4, HEADS, score=score, **options) for _ in range(2))
    x, attr = rand(NODES, CHANNELS).detach().float(), rand(41, EDGE_DIM).detach().float()
    expected = layer(x, graph(), attr)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x, graph(), attr), expected)
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(x, graph(), attr)
    assert (cast - expected).norm() < 0.03 * expected.norm()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    for given in (graph(), Edges(graph(), NODES)):
        actual = compiled(x, given, attr)
        expected = layer(x, graph(), attr)
        assert_same(actual, expected, [*layer.parameters()], rtol=1e-4, atol=1e-5)


def test_a_score_of_ones_own():
    layer = make(ScaledDot(softcap=1.0))
    x = rand(NODES, CHANNELS)
    assert not torch.allclose(layer(x, graph()), make()(x, graph()))
    tanh = make(attnkit.learned_scores.AdditiveScore(HEADS, 4))
    torch.testing.assert_close(tanh(x, graph()), make("additive")(x, graph()))


WRONG_OPTIONS = [
    ({"score": "cosin"}, "score: expected one of scaled_dot, dot, .*got 'cosin'"),
    ({"heads": 0}, "heads: expected at least 1, got 0"),
    ({"edge_dim": 0}, "edge_dim: expected at least 1, got 0"),
    ({"in_channels": (3, 4, 5)}, "in_channels: expected one number or two"),
    ({"gate": True}, "gate: needs residual=True"),
    ({"dropout_p": 1.0}, "dropout_p: expected 0 <= dropout_p < 1, got 1.0"),
    ({"value_dropout_p": 1.0}, "value_dropout_p: expected 0 <= .* < 1, got 1.0"),
    ({"dropout": 0.3, "dropout_p": 0.2}, "dropout: another name of dropout_p"),
    ({"separate_self": True, "in_channels": (3, 3)}, "separate_self: expected sources that"),
    ({"share_weights": True}, "share_weights: expected the score 'gatv2'"),
    ({"score": "gatv2", "share_weights": True, "in_channels": (3, 4)}, "share_weights: expected"),
    ({"negative_slope": 0.1}, "negative_slope: only for 'gat' and 'gatv2', got"),
    ({"score": "gat", "negative_slope": -0.1}, "negative_slope: expected at least 0, got -0.1"),
    ({"fill_value": 1.0}, "fill_value: expected 'mean', the default, without add_self_loops"),
    (
        {"edge_dim": 2, "add_self_loops": True, "fill_value": "sum"},
        "fill_value: expected a number or one of 'mean'.*got 'sum'",
    ),
    ({"backend": "edge"}, "backend: expected 'auto' or one of"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS, ids=str)
def test_wrong_options_are_named(options, message):
    assert_named(lambda: make(**options), f"ValueError: {message}")


INDEX = graph()
WRONG_GRAPHS = [
    ({"edge_index": INDEX.float()}, r"TypeError: edge_index: expected integers \[2, edges\]"),
    ({"edge_index": INDEX.T}, r"ValueError: edge_index: .*got \[41, 2\], transposed\?"),
    ({"edge_index": INDEX.tolist()}, "TypeError: edge_index: expected integers.*got list"),
    ({"edge_index": INDEX + 3}, "IndexError: edge_index: the source nodes go from 3 to"),
    ({"edge_index": Edges(INDEX, 12)}, "ValueError: edge_index: expected 11 targets and 11"),
    ({"x": torch.randn(NODES, 4)}, r"ValueError: x: expected \[nodes, 5\], got \[11, 4\]"),
    ({"x": torch.ones(NODES, CHANNELS).long()}, "TypeError: x: expected a floating-point"),
    ({"x": (torch.randn(NODES, 5), None)}, r"ValueError: x: expected \[targets, 5\], got None"),
    ({"size": (NODES, 3)}, r"ValueError: size: expected \(11, 11\), the sources and targets"),
    ({"size": (NODES,)}, r"ValueError: size: expected \(11, 11\), .*got \(11,\)"),
    ({"size": NODES}, r"ValueError: size: expected \(11, 11\), .*got 11"),
    ({"x": torch.empty(NODES, 5, device="meta")}, "ValueError: .*device of x, meta, got cpu"),
    ({"x": "nodes"}, "TypeError: x: expected a tensor or a pair of tensors, got str"),
    ({"edge_attr": None}, r"ValueError: edge_attr: expected \[edges, 2\], got None"),
    ({"edge_attr": torch.randn(40, 2)}, r"ValueError: .*\[41, 2\], got \[40, 2\]"),
    ({"edge_attr": torch.ones(41, 2).long()}, "TypeError: edge_attr: expected a floating-point"),
    ({"edge_bias": torch.zeros(41, 3)}, r"ValueError: edge_bias: .*heads\] = \[41, 1\]"),
    ({"edge_bias": torch.zeros(41, 1).long()}, "TypeError: edge_bias: expected a floating-point"),
]


@pytest.mark.parametrize(("given", "message"), WRONG_GRAPHS, ids=[m for _, m in WRONG_GRAPHS])
def test_wrong_graphs_are_named(given, message):
    layer = GraphAttention(CHANNELS, 4, edge_dim=EDGE_DIM, backend="edges")
    right = {"x": torch.randn(NODES, CHANNELS), "edge_index": INDEX,
             "edge_attr": torch.randn(41, EDGE_DIM)}  # fmt: skip
    layer(**right)
    assert_named(lambda: layer(**{**right, **given}), message)


def test_what_edges_carry_is_not_ignored():
    with pytest.raises(ValueError, match="edge_attr: expected None, since the layer"):
        make()(rand(NODES, CHANNELS), INDEX, rand(41, 2))
    layer = make(edge_dim=2, add_self_loops=True, fill_value=torch.ones(3))
    with pytest.raises(ValueError, match="fill_value: expected one number for each of 2 channels"):
        layer(rand(NODES, CHANNELS), INDEX, rand(41, 2))


@pytest.mark.parametrize("in_channels", [-1, (-1, -1), (CHANNELS, -1)])
@pytest.mark.parametrize("score", ["scaled_dot", "gatv2", "gat"])
def test_channels_are_those_of_the_first_input(score, in_channels):
    layer = GraphAttention(in_channels, 4, 2, score=score, residual=True)
    before = list(layer.parameters())
    optimizer = torch.optim.SGD(before, lr=0.1)
    target = torch.randn(NODES, 3 if isinstance(in_channels, tuple) else CHANNELS)
    x = torch.randn(NODES, CHANNELS), target
    layer.reset_parameters()
    layer(x, INDEX).sum().backward()
    assert all(map(lambda a, b: a is b, before, layer.parameters()))
    assert layer.in_channels == (CHANNELS, target.shape[1])
    known = layer.in_channels if isinstance(in_channels, tuple) else CHANNELS
    again = GraphAttention(known, 4, 2, score=score, residual=True)
    again.load_state_dict(layer.state_dict())
    torch.testing.assert_close(again(x, INDEX), layer(x, INDEX))
    first = layer(x, INDEX).detach()
    optimizer.step()
    assert not torch.equal(layer(x, INDEX), first)
    with pytest.raises(ValueError, match=f"x: expected .nodes, {CHANNELS}., got"):
        layer((torch.randn(NODES, 9), target), INDEX)


def test_a_first_input_without_targets():
    layer = GraphAttention(-1, 4, score="gat")
    layer((torch.randn(NODES, CHANNELS), None), INDEX)
    assert layer(torch.randn(NODES, CHANNELS), INDEX).shape == (NODES, 4)
    pair = torch.randn(NODES, CHANNELS), torch.randn(NODES, 3)
    with pytest.raises(ValueError, match=f"x: expected .nodes, {CHANNELS}., got"):
        GraphAttention(-1, 4)(pair, INDEX)
    with pytest.raises(ValueError, match="in_channels=-1 takes the targets' channels from"):
        GraphAttention((-1, -1), 4, score="gat")((pair[0], None), INDEX)


@pytest.mark.parametrize("score", ["gat", "gatv2", "scaled_dot"])
def test_dropout_of_the_values_in_training_only(score):
    """Node 0 alone is seen, by three others: each of its values is dropped for all of them."""
    layer = make(score, value_dropout_p=0.75, out_bias=False)
    graph = Edges(torch.tensor([[0, 0, 0], [1, 2, 3]]), 4)
    x = rand(4, CHANNELS).expand(400, -1, -1)
    whole = layer.eval()(x, graph)[:, 1:]
    kept = layer.train()(x, graph)[:, 1:]
    assert torch.equal(kept, kept[:, :1].expand(-1, 3, -1))
    torch.testing.assert_close(kept, whole * 4 * (kept != 0))
    assert 0.22 < (kept[:, 0] != 0).double().mean() < 0.28


def test_names_of_pyg():
    assert GraphAttention(5, 4, dropout=0.3).dropout_p == 0.3
    assert repr(GraphAttention((5, 3), 4, 2)) == "GraphAttention((5, 3), 4, heads=2)"
