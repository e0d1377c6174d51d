"""Attention over edges by torch's operators and by numba's kernels: against the definition and
against dense attention, on every kind of graph, and never with a tensor of edges × channels."""

import pytest
import torch
from edge_graphs import (
    BATCH,
    HEADS,
    SCORES,
    VALUE_DIM,
    assert_is_the_definition,
    given,
    graphs,
    rand,
    random_graph,
    results,
)
from support import Largest, with_third

import attnkit
from attnkit import Dense, EdgeFeatures, Edges, GraphAttention, attend, edge_weights
from attnkit.core.kernels.edges import scores as edge_scores

EDGE_DIM = 11
KERNELS = ["edges", "edges_numba"]
SERVED = [s for s in SCORES if s != "softcap"]

every_kernel = pytest.mark.parametrize("kernel", KERNELS)


@pytest.mark.parametrize(
    ("graph", "score", "computed_in"),
    with_third(graphs(), SERVED, ("together", "apart")),
    indirect=["computed_in"],
)
def test_the_kernels_are_the_definition(graph, score, computed_in):
    inputs, make_score = given(score)
    mask = graphs()[graph]
    for kernel in KERNELS[: 1 if score == "tanh" else 2]:
        output = assert_is_the_definition(
            kernel, inputs, lambda tensors: {"mask": mask, "score": make_score(tensors)}
        )
        alone = ~torch.isin(torch.arange(11), mask.edge_index[1])
        assert (output[:, :, alone] == 0).all()


@every_kernel
@pytest.mark.parametrize("score", ["scaled_dot", "general", "tanh", "gatv2", "gat"])
@pytest.mark.parametrize("reads", ["key", "value", "key value bias", "bias"])
def test_what_edges_carry(kernel, score, reads, computed_in):
    if (kernel, score) == ("edges_numba", "tanh"):
        return
    inputs, make_score = given(score)
    mask, dim, num_own = graphs()["repeated"], SCORES[score][0], len(inputs)
    carried = {
        "features": rand(mask.num_edges, EDGE_DIM, seed=6),
        "key_weight": rand(HEADS, dim, EDGE_DIM, seed=7) if "key" in reads else None,
        "value_weight": rand(HEADS, VALUE_DIM, EDGE_DIM, seed=8) if "value" in reads else None,
        "bias": rand(mask.num_edges, HEADS, seed=9) if "bias" in reads else None,
    }
    if reads == "bias":  # the same for all heads, and nothing else
        carried = {"bias": rand(mask.num_edges, 1, seed=9)}
    names = [name for name, tensor in carried.items() if tensor is not None]

    def options(tensors):
        read = dict(zip(names, tensors[num_own:], strict=True))
        if "bias" in read:
            read["bias"] = read["bias"].T  # heads stand next to each other, as layers give them
        score = make_score(tensors[:num_own])
        return {"mask": mask, "score": score, "edge_features": EdgeFeatures(**read)}

    output = assert_is_the_definition(kernel, [*inputs, *(carried[n] for n in names)], options)
    plain = attend(*inputs[:3], mask=mask, score=make_score(inputs))
    assert not torch.allclose(output.double(), plain, atol=1e-3)


@every_kernel
@pytest.mark.parametrize("score", ["scaled_dot", "gatv2", "gat"])
def test_targets_of_many_edges_and_of_none(kernel, score, computed_in):
    """Degrees from 0 to far above the edges that are computed at once."""
    counts = torch.tensor([0, 1, 7, 8, 9, 63, 64, 65, 0, 127, 1021, 0])
    target = torch.arange(len(counts)).repeat_interleave(counts)
    source = torch.randint(13, (len(target),), generator=torch.Generator().manual_seed(0))
    shuffled = torch.randperm(len(target), generator=torch.Generator().manual_seed(1))
    mask = Edges(torch.stack([source, target])[:, shuffled], (13, len(counts)))
    inputs, make_score = given(score, num_targets=len(counts))
    assert_is_the_definition(
        kernel, inputs, lambda tensors: {"mask": mask, "score": make_score(tensors)}
    )


@every_kernel
@pytest.mark.parametrize(
    ("score", "spread"), [*((s, 1) for s in SERVED), ("scaled_dot", 30), ("gatv2", 30)]
)
@pytest.mark.parametrize("dead", [[4], [0, 4, 8], [*range(11)]], ids=["a hub", "some", "all"])
def test_a_target_whose_edges_are_forbidden_has_none(kernel, score, spread, dead, computed_in):
    """By the bias −∞, the logarithm of a weight of 0; also where scores are of ±1,000, whose
    exponentials are not within the range of numbers."""
    if (kernel, score) == ("edges_numba", "tanh"):
        return
    inputs, make_score = given(score)
    inputs[0], inputs[1] = spread * inputs[0], spread * inputs[1]
    edges = graphs()["hub"]
    is_dead = torch.isin(edges.edge_index[1], torch.tensor(dead))
    is_dead[::3] = True

    def options(tensors):
        bias = torch.zeros(1, edges.num_edges, dtype=tensors[0].dtype)
        carried = EdgeFeatures(bias=bias.masked_fill(is_dead, -torch.inf))
        return {"mask": edges, "score": make_score(tensors), "edge_features": carried}

    output = assert_is_the_definition(kernel, inputs, options)
    assert (output[:, :, dead] == 0).all()
    left = Edges(edges.edge_index[:, ~is_dead], 11, 13)
    expected = attend(*inputs[:3], mask=left, score=make_score(inputs), backend="reference")
    torch.testing.assert_close(output.double(), expected, atol=2e-3, rtol=1e-3)
    _, *others = options(inputs).items()
    weights = edge_weights(*inputs[:2], edges, **dict(others))
    assert (weights[..., is_dead] == 0).all()


def test_the_definition_is_dense_attention():
    for name in ("hub", "complete", "self loops"):
        graph = Edges(graphs()[name].edge_index.unique(dim=1), 11, 13)
        dense = torch.zeros(11, 13, dtype=torch.bool)
        dense[graph.edge_index[1], graph.edge_index[0]] = True
        for score in SERVED:
            inputs, make_score = given(score)
            options = {"score": make_score(inputs)}
            by_mask = attend(*inputs[:3], mask=Dense(dense), **options)
            for backend in ("edges", "reference"):
                by_edges = attend(*inputs[:3], mask=graph, **options, backend=backend)
                torch.testing.assert_close(by_edges, by_mask, atol=1e-9, rtol=1e-7)


def test_an_edge_given_twice_counts_twice():
    query, key, value = given("scaled_dot")[0]
    edges = Edges(torch.tensor([[0, 1, 1], [0, 0, 0]]), 11, 13)
    weights = attnkit.attention_weights(query, key, mask=Dense(torch.ones(11, 13) > 0))
    share = weights[:, :, 0, :2] * torch.tensor([1.0, 2.0])
    share = share / share.sum(-1, keepdim=True)
    expected = torch.einsum("bhj,bhjd->bhd", share, value[:, :, :2])
    torch.testing.assert_close(attend(query, key, value, mask=edges)[:, :, 0], expected)
    reasons = attnkit.explain_backends(query, key, value, mask=edges).reasons
    twice = "reads a boolean mask, which cannot hold duplicate edges"
    assert all(reasons[name] == [twice] for name in ("flash", "blockwise", "math"))
    assert reasons["edges"] == reasons["reference"] == []
    with pytest.raises(ValueError, match="duplicate edges in softmax alone"):
        attend(query, key, value, mask=edges, normalizer="linear")


@every_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("score", ["scaled_dot", "cosine", "gatv2"])
def test_lower_precision_is_computed_in_float32(kernel, dtype, score):
    inputs, make_score = given(score, dtype=dtype)
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    options = {"mask": graphs()["hub"], "backend": kernel}
    actual = attend(*inputs[:3], score=make_score(inputs), **options)
    expected = attend(*wide[:3], score=make_score(wide), **options)
    assert actual.dtype == dtype
    tolerance = 2e-2 if score == "cosine" else 0  # whose parameter is rounded once more
    torch.testing.assert_close(actual, expected.to(dtype), atol=tolerance, rtol=0)


@every_kernel
def test_grouped_heads_strides_and_no_batch(kernel):
    query = rand(11, 4, 5, seed=1, dtype=torch.float32).transpose(0, 1)[..., :3]
    key = rand(13, 2, 3, seed=2, dtype=torch.float32).transpose(0, 1).flip(2)
    value = rand(1, 2, VALUE_DIM, seed=3, dtype=torch.float32).expand(13, -1, -1).transpose(0, 1)
    mask = graphs()["some"]
    actual = attend(query[None], key[None], value[None], mask=mask, backend=kernel)
    expected = attend(query[None], key[None], value[None], mask=mask, backend="reference")
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)
    alone = attend(query, key, value, mask=mask, backend=kernel)
    torch.testing.assert_close(alone, expected[0], atol=1e-6, rtol=1e-5)


@every_kernel
@pytest.mark.parametrize("score", ["scaled_dot", "gatv2", "gat"])
def test_dropout_drops_the_same_edges_in_the_backward(kernel, score, computed_in):
    dtype = torch.float32 if kernel == "edges_numba" else torch.float64
    inputs, make_score = given(score, dtype=dtype)
    query, key, value = inputs[:3]
    options = {"mask": graphs()["complete"], "score": make_score(inputs), "dropout_p": 0.25}

    def run(value, seed=5):
        torch.manual_seed(seed)
        return attend(query, key, value, **options, backend=kernel)

    # the weights that are kept are what values that tell the sources apart come to
    kept = run(torch.eye(13, dtype=dtype).expand(BATCH, HEADS, -1, -1))
    weights = attnkit.attention_weights(query, key, score=options["score"])
    keep = (kept > 0).to(dtype) / 0.75
    torch.testing.assert_close(kept, weights * keep)
    assert 0.68 < (kept > 0).double().mean() < 0.82
    assert not torch.equal(keep[0, 0], keep[0, 1])  # heads
    assert not torch.equal(keep[0, 0], keep[1, 0])  # items
    actual = results(run(value), inputs)
    expected = results((weights * keep.detach()) @ value, inputs)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    assert not torch.equal(run(value, seed=4), actual[0])


@pytest.mark.parametrize(
    ("made", "score"),
    [*(("edges", s) for s in SERVED), ("edges_numba", "gatv2"), *(("weights", s) for s in SERVED)],
)
def test_nothing_of_edges_times_channels_is_made(made, score, monkeypatch):
    monkeypatch.setattr(edge_scores, "GROUP", 2**13)
    monkeypatch.setattr(edge_scores, "BLOCK", 2**13)
    num_edges = 10_007
    mask = Edges(random_graph(13, 11, num_edges), 11, 13)
    dtype = torch.float32 if made == "edges_numba" else torch.float64
    inputs, make_score = given(score, dtype=dtype)
    options = {"score": make_score(inputs)}
    if made == "edges" and score not in ("cosine", "gaussian"):
        features = [rand(num_edges, 1), rand(HEADS, SCORES[score][0], 1), rand(HEADS, VALUE_DIM, 1)]
        options["edge_features"] = EdgeFeatures(*features)
    with Largest() as largest:
        if made == "weights":
            output = edge_weights(*inputs[:2], mask, **options)
        else:
            output = attend(*inputs[:3], mask=mask, **options, backend=made, dropout_p=0.1)
        output.square().sum().backward()
    lanes, bound = BATCH * HEADS, BATCH * HEADS * num_edges
    # the pairs of nodes that edges are, of which a hub's block holds all; numba has two numbers for
    # each edge and lane, and a task of so few targets has all arguments of one lane
    bound = max(bound, num_edges * SCORES[score][0] // 2)
    if made == "edges_numba":
        bound = max(2 * lanes, 24 + 3) * num_edges + 10_000
    assert largest.numel <= bound


def test_forms_of_edges():
    from torch_geometric import EdgeIndex

    index = random_graph().unique(dim=1)
    inputs = given("scaled_dot", dtype=torch.float32)[0]
    graph = Edges(index, 11, 13)
    expected = attend(*inputs, mask=graph)
    matrix = torch.zeros(11, 13)
    matrix[index[1], index[0]] = 1
    for edges in (
        Edges(matrix.to_sparse(), 11, 13),
        Edges(matrix.to_sparse_csr()),
        Edges(EdgeIndex(index.contiguous(), sparse_size=(13, 11)), 11, 13),
        Edges(index, (13, 11)),  # as PyG's size
        Edges(index.int().T.contiguous().T, 11, 13),
    ):
        assert type(edges.edge_index) is torch.Tensor
        for kernel in KERNELS:
            found = attend(*inputs, mask=edges, backend=kernel)
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    first = graph.adjacency  # is sorted once
    attend(*inputs, mask=graph, backend="edges")
    assert graph.adjacency is first
    assert first.copies(3) is first.copies(3)


def test_where_it_pays():
    query, key, value = given("scaled_dot")[0]
    sparse, full = graphs()["one edge"], graphs()["complete"]
    assert attnkit.explain_backends(query, key, value, mask=sparse).chosen == "edges"
    assert attnkit.explain_backends(query, key, value, mask=full).chosen == "flash"
    carried = EdgeFeatures(rand(143, 2), rand(HEADS, 5, 2))
    explained = attnkit.explain_backends(query, key, value, mask=full, edge_features=carried)
    assert explained.chosen == "edges"
    assert explained.reasons["flash"] == ["cannot read edge features"]


@pytest.mark.parametrize("batch", [(), (2,)], ids=["a graph", "a batch"])
@pytest.mark.parametrize("score", ["scaled_dot", "additive", "gat", "gatv2", "cosine"])
def test_layers_give_the_weights_that_they_used(score, batch):
    """With targets whose edges all have the bias −∞, whose outputs and weights are 0."""
    layer = GraphAttention(3, 4, 2, score=score, out_bias=False).double()
    x, edges = rand(*batch, 13, 3), torch.arange(11).expand(2, -1)
    edges = torch.cat([edges, graphs()["some"].edge_index], dim=1).unique(dim=1)
    bias = (edges[1] % 4 != 0).double().log()
    output, (_, weights) = layer(x, edges, return_attention_weights=True, edge_bias=bias)
    assert output.isfinite().all()
    assert (output[..., ::4, :] == 0).all()
    torch.testing.assert_close(layer.attention_weights(x, edges, edge_bias=bias), weights)
    with attnkit.capture_attention(layer) as captured:
        layer(x, edges, edge_bias=bias)
    torch.testing.assert_close(captured[""][0], weights)
    sums = weights.new_zeros(*batch, 13, 2).index_add(-2, edges[1], weights)
    is_served = torch.zeros(13, dtype=torch.bool).index_fill(0, edges[1], True)
    is_served[::4] = False
    torch.testing.assert_close(sums, is_served[:, None].double().expand_as(sums))


def attends(**options):
    return lambda: attend(*given("scaled_dot")[0], **options)


def carries(*carried, **options):
    return attends(mask=graphs()["some"], edge_features=EdgeFeatures(*carried, **options))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Edges(random_graph(), None), "num_nodes: expected the number of nodes"),
        (lambda: Edges(random_graph(), (13, 11), 13), r"num_nodes: expected a number, or"),
        (lambda: Edges(random_graph(), (13, 11, 1)), r"or \(sources, targets\)"),
        (lambda: Edges(random_graph().T, 11, 13), r"got \[41, 2\], transposed\?"),
        (lambda: Edges(torch.eye(3).to_sparse(), 5), "num_nodes: the sparse matrix has"),
        (
            attends(edge_features=EdgeFeatures(rand(41, 2))),
            "edge_features: expected Edges alone as the mask, got None",
        ),
        (
            attends(mask=graphs()["some"], edge_features=rand(41, 2)),
            "edge_features: expected attnkit.EdgeFeatures, got Tensor",
        ),
        (carries(rand(40, 2)), r"edge_features: expected \[41 edges, edge_dim\], got \[40, 2\]"),
        (
            carries(rand(41, 2), rand(3, 4, 2)),
            r"key_weight: expected \[heads, dim, edge_dim\] = \[3, 5, 2\], got \[3, 4, 2\]",
        ),
        (carries(bias=rand(41, 3)), r"bias: expected \[heads, edges\] = \[3, 41\], got \[41, 3\]"),
        (
            carries(key_weight=rand(3, 5, 2), bias=rand(3, 41)),
            "features: expected a floating-point tensor, got NoneType",
        ),
        (
            attends(mask=graphs()["some"], score=attnkit.ScaledDot(softcap=2.0), backend="edges"),
            "cannot compute a softcap",
        ),
    ],
)
def test_what_it_refuses(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
