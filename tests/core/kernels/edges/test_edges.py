"""Attention over edges: against the definition and against dense attention, on every kind of graph,
and never with a tensor of edges × heads × channels."""

from dataclasses import replace

import pytest
import torch
from edge_graphs import graphs, rand, random_graph, results
from support import Largest, with_third

import attnkit
from attnkit import Additive, Cosine, Dense, EdgeFeatures, Edges, Gaussian, General, attend
from attnkit.core.kernels.edges import scores as edge_scores

BATCH, HEADS, DIM, VALUE_DIM, EDGE_DIM = 2, 3, 5, 7, 2


def gat_tensors():
    """Queries and keys of one channel."""
    query, key, value = tensors()
    return [query[..., :1].detach().requires_grad_(), key[..., :1].detach().requires_grad_(), value]


def tensors(dtype=torch.float64, kv_heads=HEADS):
    return [
        rand(BATCH, HEADS, 11, DIM, seed=1, dtype=dtype),
        rand(BATCH, kv_heads, 13, DIM, seed=2, dtype=dtype),
        rand(BATCH, kv_heads, 13, VALUE_DIM, seed=3, dtype=dtype),
    ]


def scores(dtype=torch.float64):
    return {
        "scaled_dot": (lambda: "scaled_dot", []),
        "general": (General, [rand(HEADS, DIM, DIM, seed=4, dtype=dtype)]),
        "cosine": (Cosine, [(rand(HEADS, dtype=dtype).detach().abs() + 0.5).requires_grad_()]),
        "gaussian": (Gaussian, [(rand(HEADS, dtype=dtype).detach().abs() + 1).requires_grad_()]),
        "tanh": (Additive, [rand(HEADS, DIM, seed=5, dtype=dtype)]),
        "gatv2": (
            lambda vector: Additive(vector, "leaky_relu", 0.3),
            [rand(HEADS, DIM, seed=5, dtype=dtype)],
        ),
        "relu": (lambda v: Additive(v, "leaky_relu", 0.0), [rand(DIM, seed=5, dtype=dtype)]),
    }


@pytest.fixture(params=["groups", "blocks"])
def computed_in(request, monkeypatch):
    """All heads of a small graph at once, or each alone and in blocks of a few edges."""
    if request.param == "blocks":
        monkeypatch.setattr(edge_scores, "GROUP", 0)
        monkeypatch.setattr(edge_scores, "BLOCK", 40)


@pytest.mark.parametrize(
    ("graph", "score", "computed_in"),
    with_third(graphs(), scores(), ("groups", "blocks")),
    indirect=["computed_in"],
)
def test_the_kernel_is_the_definition(graph, score, computed_in):
    make_score, parameters = scores()[score]
    inputs = [*tensors(), *parameters]
    mask = graphs()[graph]
    options = {"mask": mask, "score": make_score(*parameters)}
    expected = results(attend(*inputs[:3], **options, backend="reference"), inputs)
    actual = results(attend(*inputs[:3], **options, backend="edges"), inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)
    alone = ~torch.isin(torch.arange(11), mask.edge_index[1])
    assert (actual[0][:, :, alone] == 0).all()
    assert (actual[1][:, :, alone] == 0).all()


@pytest.mark.parametrize("graph", ["some", "hub", "no edges"])
@pytest.mark.parametrize("activation", ["tanh", "leaky_relu"])
def test_scores_of_one_channel(graph, activation, computed_in):
    """As in GAT, whose score is LeakyReLU(a · Wx_i + a′ · Wx_j + a″ · e)."""
    mask = graphs()[graph]
    vector = rand(HEADS, 1, seed=5)
    features = [rand(mask.num_edges, EDGE_DIM), rand(HEADS, 1, EDGE_DIM)]
    inputs = [*gat_tensors(), vector, *features]
    options = {"mask": mask, "score": Additive(vector, activation)}
    options["edge_features"] = EdgeFeatures(*features)
    expected = results(attend(*inputs[:3], **options, backend="reference"), inputs)
    actual = results(attend(*inputs[:3], **options, backend="edges"), inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("score", ["scaled_dot", "general", "tanh", "gatv2"])
@pytest.mark.parametrize("reads", ["both", "key", "value"])
def test_what_edges_carry(score, reads, computed_in):
    make_score, parameters = scores()[score]
    features = rand(48, EDGE_DIM, seed=6)
    key_weight = rand(HEADS, DIM, EDGE_DIM, seed=7) if reads != "value" else None
    value_weight = rand(HEADS, VALUE_DIM, EDGE_DIM, seed=8) if reads != "key" else None
    inputs = [*tensors(), *parameters, features]
    inputs += [weight for weight in (key_weight, value_weight) if weight is not None]
    options = {
        "mask": graphs()["repeated"],
        "score": make_score(*parameters),
        "edge_features": EdgeFeatures(features, key_weight, value_weight),
    }
    expected = results(attend(*inputs[:3], **options, backend="reference"), inputs)
    actual = results(attend(*inputs[:3], **options, backend="edges"), inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)
    plain = attend(*inputs[:3], mask=options["mask"], score=options["score"])
    assert not torch.allclose(actual[0], plain)


@pytest.mark.parametrize(
    ("score", "with_features", "of_heads"),
    with_third(["scaled_dot", "tanh", "gatv2", "gat"], [False, True], [HEADS, 1]),
)
def test_a_bias_for_each_edge(score, of_heads, with_features, computed_in):
    mask = graphs()["repeated" if score in ("scaled_dot", "gat") else "hub"]
    bias = rand(of_heads, mask.num_edges, seed=9)
    if score == "gat":
        vector = rand(HEADS, 1, seed=5)
        inputs, of_score = [*gat_tensors(), vector], Additive(vector, "leaky_relu")
    else:
        make_score, parameters = scores()[score]
        inputs, of_score = [*tensors(), *parameters], make_score(*parameters)
    carried = {}
    if with_features:
        carried = {
            "features": rand(mask.num_edges, EDGE_DIM, seed=6),
            "key_weight": rand(HEADS, inputs[1].shape[3], EDGE_DIM, seed=7),
        }
    inputs += [bias, *carried.values()]
    features = EdgeFeatures(bias=bias, **carried)
    options = {"mask": mask, "score": of_score, "edge_features": features}
    expected = results(attend(*inputs[:3], **options, backend="reference"), inputs)
    actual = results(attend(*inputs[:3], **options, backend="edges"), inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)
    given = {"score": of_score, "edge_features": features}
    weights = attnkit.edge_weights(*inputs[:2], mask, **given)
    given["edge_features"] = replace(features, bias=None) if with_features else None
    raised = attnkit.edge_weights(*inputs[:2], mask, **given) * bias.exp()
    target = mask.edge_index[1]
    totals = raised.new_zeros(*raised.shape[:2], 11).index_add(2, target, raised)
    expected = results(raised / totals[:, :, target], [inputs[0], bias])
    for ours, theirs in zip(results(weights, [inputs[0], bias]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)


def test_the_definition_is_dense_attention():
    query, key, value = tensors()
    for name in ("hub", "complete", "self loops"):
        graph = graphs()[name]
        if graph.has_repeated:
            graph = Edges(graph.edge_index.unique(dim=1), 11, 13)
        dense = torch.zeros(11, 13, dtype=torch.bool)
        dense[graph.edge_index[1], graph.edge_index[0]] = True
        for score in scores():
            make_score, parameters = scores()[score]
            options = {"score": make_score(*parameters)}
            by_mask = attend(query, key, value, mask=Dense(dense), **options)
            for backend in ("edges", "reference"):
                by_edges = attend(query, key, value, mask=graph, **options, backend=backend)
                torch.testing.assert_close(by_edges, by_mask, atol=1e-9, rtol=1e-7)


def test_an_edge_given_twice_counts_twice():
    query, key, value = tensors()
    index = torch.tensor([[0, 1, 1], [0, 0, 0]])
    output = attend(query, key, value, mask=Edges(index, 11, 13))
    weights = attnkit.attention_weights(query, key, mask=Dense(torch.ones(11, 13) > 0))
    share = weights[:, :, 0, :2] * torch.tensor([1.0, 2.0])
    share = share / share.sum(-1, keepdim=True)
    expected = torch.einsum("bhj,bhjd->bhd", share, value[:, :, :2])
    torch.testing.assert_close(output[:, :, 0], expected)
    reasons = attnkit.explain_backends(query, key, value, mask=Edges(index, 11, 13)).reasons
    twice = "reads a boolean mask, which cannot hold duplicate edges"
    assert all(reasons[name] == [twice] for name in ("flash", "blockwise", "math"))
    assert reasons["edges"] == reasons["reference"] == []
    with pytest.raises(ValueError, match="duplicate edges in softmax alone"):
        attend(query, key, value, mask=Edges(index, 11, 13), normalizer="linear")


@pytest.mark.parametrize("score", ["scaled_dot", "tanh", "gatv2"])
def test_gradcheck(score, computed_in):
    make_score, parameters = scores()[score]
    features = [rand(41, EDGE_DIM, seed=6), rand(HEADS, DIM, EDGE_DIM, seed=7)]
    features.append(rand(HEADS, VALUE_DIM, EDGE_DIM, seed=8))
    mask = graphs()["some"]

    def function(query, key, value, *rest):
        given = EdgeFeatures(*rest[-3:])
        score = make_score(*rest[:-3])
        return attend(query, key, value, mask=mask, score=score, edge_features=given)

    inputs = [*tensors(), *parameters, *features]
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("score", ["scaled_dot", "cosine", "gatv2"])
def test_lower_precision(dtype, score):
    make_score, parameters = scores(dtype)[score]
    inputs = [*tensors(dtype), *parameters]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    options = {"mask": graphs()["hub"]}
    wide = make_score(*exact[3:])
    expected = results(attend(*exact[:3], **options, score=wide, backend="reference"), exact)
    narrow = make_score(*parameters)
    actual = results(attend(*inputs[:3], **options, score=narrow, backend="edges"), inputs)
    assert actual[0].dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("score", ["scaled_dot", "gatv2"])
def test_scores_that_differ_by_much(score, computed_in):
    """Exponentials are shifted by one number, or where that would underflow by each row's own."""
    make_score, parameters = scores()[score]
    query, key, value = tensors()
    spread = torch.logspace(-3, 3, 11, dtype=torch.float64)[:, None]
    query = (query.detach() * spread).requires_grad_()
    inputs = [query, key, value]
    options = {"mask": graphs()["hub"], "score": make_score(*(p * 100 for p in parameters))}
    expected = results(attend(*inputs, **options, backend="reference"), inputs)
    actual = results(attend(*inputs, **options, backend="edges"), inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-7)


def test_grouped_heads_strides_and_no_batch():
    query, key, value = tensors(kv_heads=1)
    graph = graphs()["some"]
    expected = attend(query, key.expand(-1, 3, -1, -1), value.expand(-1, 3, -1, -1), mask=graph)
    torch.testing.assert_close(attend(query, key, value, mask=graph), expected)
    torch.testing.assert_close(attend(query[1], key[1], value[1], mask=graph), expected[1])
    # nodes × heads × channels, as layers have them
    nodes_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]
    assert not nodes_first[0].is_contiguous()
    torch.testing.assert_close(attend(*nodes_first, mask=graph), expected)


@pytest.mark.parametrize("score", ["scaled_dot", "gatv2"])
def test_dropout_is_the_same_in_the_backward(score, computed_in):
    make_score, parameters = scores()[score]
    query, key, value = tensors()
    hub = torch.stack([torch.arange(2003) % 13, torch.zeros(2003, dtype=torch.long)])
    graph = Edges(hub, 11, 13)
    options = {"mask": graph, "score": make_score(*parameters), "dropout_p": 0.25}
    ones = torch.ones_like(value)
    kept = attend(query, key, ones, **options)[:, :, 0]
    assert abs(kept.mean() - 1) < 0.05
    assert kept.std() > 1e-3
    # linear in the values, with the gradient of the very weights that were kept
    torch.manual_seed(3)
    output = attend(query, key, value, **options)
    (gradient,) = torch.autograd.grad(output.sum(), value)
    torch.testing.assert_close((gradient * value).sum(), output.sum())
    torch.manual_seed(3)
    torch.testing.assert_close(attend(query, key, value, **options), output)
    torch.manual_seed(4)
    assert not torch.equal(attend(query, key, value, **options), output)

    def function(query, key, value):
        torch.manual_seed(5)
        return attend(query, key, value, **options)

    assert torch.autograd.gradcheck(function, (query, key, value), fast_mode=True)


@pytest.mark.parametrize(
    ("score", "with_features"),
    [
        *((score, False) for score in scores()),
        *((score, True) for score in scores() if score not in ("cosine", "gaussian")),
    ],
)
def test_nothing_of_edges_times_channels_is_made(score, with_features, monkeypatch):
    monkeypatch.setattr(edge_scores, "GROUP", 2**13)
    monkeypatch.setattr(edge_scores, "BLOCK", 2**13)
    make_score, parameters = scores()[score]
    num_edges, dim = 10_007, 5
    graph = Edges(random_graph(13, 11, num_edges), 11, 13)
    inputs = [*tensors(), *parameters]
    options = {"mask": graph, "score": make_score(*parameters)}
    if with_features:
        features = [rand(num_edges, 1), rand(HEADS, dim, 1), rand(HEADS, VALUE_DIM, 1)]
        options["edge_features"] = EdgeFeatures(*features)
        inputs += features
    with Largest() as largest:
        output = attend(*inputs[:3], **options, backend="edges", dropout_p=0.1)
        output.square().sum().backward()
    # the weights of all heads and items are, and the pairs of nodes that edges are; a hub's block
    # holds all its edges
    assert largest.numel <= max(BATCH * HEADS * num_edges, num_edges * dim // 2)


def test_the_graph_is_sorted_once():
    graph = graphs()["some"]
    first = graph.adjacency
    attend(*tensors(), mask=graph, backend="edges")
    assert graph.adjacency is first
    assert first.source.dtype == torch.int32
    assert first.copies(3) is first.copies(3)
    place = first.order.argsort()
    torch.testing.assert_close(first.source[place].long(), graph.edge_index[0])
    torch.testing.assert_close(first.target[place].long(), graph.edge_index[1])
    assert (first.target[1:] >= first.target[:-1]).all()
    by_source = first.source[first.by_source]
    assert (by_source[1:] >= by_source[:-1]).all()


def test_forms_of_edges():
    from torch_geometric import EdgeIndex

    index = random_graph().unique(dim=1)
    expected = attend(*tensors(), mask=Edges(index, 11, 13))
    matrix = torch.zeros(11, 13)
    matrix[index[1], index[0]] = 1
    for given in (
        Edges(matrix.to_sparse(), 11, 13),
        Edges(matrix.to_sparse_csr()),
        Edges(EdgeIndex(index.contiguous(), sparse_size=(13, 11)), 11, 13),
        Edges(index.int(), 11, 13),
    ):
        assert type(given.edge_index) is torch.Tensor
        torch.testing.assert_close(attend(*tensors(), mask=given), expected)


def test_where_it_pays():
    query, key, value = tensors()
    sparse, full = graphs()["one edge"], graphs()["complete"]
    assert attnkit.explain_backends(query, key, value, mask=sparse).chosen == "edges"
    assert attnkit.explain_backends(query, key, value, mask=full).chosen == "flash"
    given = EdgeFeatures(rand(143, 2), rand(HEADS, DIM, 2))
    explained = attnkit.explain_backends(query, key, value, mask=full, edge_features=given)
    assert explained.chosen == "edges"
    assert explained.reasons["flash"] == ["cannot read edge features"]
    with attnkit.record_backends() as record:
        attend(query, key, value, mask=sparse)
    assert record.total() == {"edges": 1}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Edges(random_graph(), None), TypeError, "num_nodes: expected the number of nodes"),
        (
            lambda: Edges(random_graph(), (13, 11), 13),
            ValueError,
            r"num_nodes: expected a number, or",
        ),
        (lambda: Edges(random_graph(), (13, 11, 1)), ValueError, r"or \(sources, targets\)"),
        (lambda: Edges(random_graph().T, 11, 13), ValueError, r"got \[41, 2\], transposed\?"),
        (
            lambda: Edges(torch.eye(3).to_sparse(), 5),
            ValueError,
            "num_nodes: the sparse matrix has",
        ),
        (
            lambda: attend(*tensors(), edge_features=EdgeFeatures(rand(41, 2))),
            ValueError,
            "edge_features: expected Edges alone as the mask, got None",
        ),
        (
            lambda: attend(*tensors(), mask=graphs()["some"], edge_features=rand(41, 2)),
            TypeError,
            "edge_features: expected attnkit.EdgeFeatures, got Tensor",
        ),
        (
            lambda: attend(
                *tensors(), mask=graphs()["some"], edge_features=EdgeFeatures(rand(40, 2))
            ),
            ValueError,
            r"edge_features: expected \[41 edges, edge_dim\], got \[40, 2\]",
        ),
        (
            lambda: attend(
                *tensors(),
                mask=graphs()["some"],
                edge_features=EdgeFeatures(rand(41, 2), rand(3, 4, 2)),
            ),
            ValueError,
            r"key_weight: expected \[heads, dim, edge_dim\] = \[3, 5, 2\], got \[3, 4, 2\]",
        ),
        (
            lambda: attend(
                *tensors(), mask=graphs()["some"], edge_features=EdgeFeatures(bias=rand(41, 3))
            ),
            ValueError,
            r"bias: expected \[heads, edges\] = \[3, 41\], got \[41, 3\]",
        ),
        (
            lambda: attend(
                *tensors(),
                mask=graphs()["some"],
                edge_features=EdgeFeatures(key_weight=rand(3, 5, 2), bias=rand(3, 41)),
            ),
            TypeError,
            "features: expected a floating-point tensor, got NoneType",
        ),
        (
            lambda: attend(
                *tensors(),
                mask=graphs()["some"],
                score=attnkit.ScaledDot(softcap=2.0),
                backend="edges",
            ),
            attnkit.UnsupportedError,
            "cannot compute a softcap",
        ),
    ],
)
def test_what_it_refuses(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_both_numbers_of_nodes_as_pygs_size():
    edges = Edges(random_graph(), (13, 11))
    assert edges.sizes == (11, 13)
    assert torch.equal(edges.adjacency.source, Edges(random_graph(), 11, 13).adjacency.source)
