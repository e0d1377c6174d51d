"""Uses of graph attention that went wrong once: modes, dtypes, derivatives, saved tensors."""

import copy
import io

import numpy as np
import pytest
import torch

import attnkit
from attnkit import GAT, Edges, GraphAttention, attend

NODES = 30


@pytest.fixture
def graph():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(NODES, (2, 200), generator=generator).unique(dim=1)


@pytest.fixture
def x():
    return torch.randn(NODES, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("edge_dim", [None, 3])
def test_evaluated_in_inference_mode_then_trained(graph, x, edge_dim):
    # numba takes long to compile what reads features
    backend = "edges" if edge_dim else "auto"
    model = GAT(8, 16, 3, heads=2, edge_dim=edge_dim, backend=backend)
    edges = Edges(graph, NODES)
    features = None if edge_dim is None else torch.randn(graph.shape[1], edge_dim)
    with torch.inference_mode():
        model.eval()(x, edges, features)
    model.train()(x, edges, features).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_layer_leaves_its_tensors_alone(graph, x):
    layer = GraphAttention(8, 4, heads=2)
    before = layer(x, graph)
    other = graph.flip(0)
    file = io.BytesIO()
    torch.save(graph, file)
    file.seek(0)
    assert torch.equal(torch.load(file), graph)
    graph.data.copy_(other)
    after = layer(x, graph)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(layer(x, copy.deepcopy(graph)), after)


def test_second_derivatives_are_refused_not_lost(graph):
    query, key = (torch.randn(1, 2, NODES, 4, requires_grad=True) for _ in range(2))
    mask = Edges(graph, NODES)
    output = attend(query, key, key, mask=mask, backend="edges")
    with pytest.raises(RuntimeError, match=r"edges.* has no second derivative"):
        torch.autograd.grad(output.square().sum(), query, create_graph=True)
    output = attend(query, key, key, mask=mask, backend="reference")
    (first,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), query)
    assert second.abs().sum() > 0


def test_transforms_of_torch_func(graph):
    query, key = (torch.randn(1, 2, NODES, 4, dtype=torch.float64) for _ in range(2))
    mask = Edges(graph[:, :20], NODES)

    def loss(query):
        return attend(query, key, key, mask=mask).square().sum()

    assert attnkit.explain_backends(query, key, key, mask=mask).chosen == "edges"
    by_func = torch.func.grad(loss)(query)
    query.requires_grad_()
    torch.testing.assert_close(by_func, torch.autograd.grad(loss(query), query)[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_any_integers_are_indices(graph, x, dtype):
    layer = GraphAttention(8, 4, heads=2)
    torch.testing.assert_close(layer(x, graph.to(dtype)), layer(x, graph))
    edges = Edges(torch.tensor([[59_999], [59_998]], dtype=torch.int32), 60_000)
    nodes = torch.randn(1, 1, 60_000, 2)
    weights = attnkit.attention_weights(nodes, nodes, mask=edges, rows=[59_998, 0])
    assert weights.nonzero().tolist() == [[0, 0, 0, 59_999]]
    assert not edges.has_repeated


def test_weights_of_an_edge_given_twice_are_those_of_edges():
    query = torch.randn(1, 1, 3, 4)
    edges = Edges(torch.tensor([[1, 1, 2], [0, 0, 0]]), 3)
    with pytest.raises(ValueError, match=r"no duplicate edges.*edge_weights"):
        attnkit.attention_weights(query, query, mask=edges)
    weights = attnkit.edge_weights(query, query, edges)
    torch.testing.assert_close(
        (weights[..., None] * query[:, :, [1, 1, 2]]).sum(2),
        attend(query, query, query, mask=edges)[:, :, 0],
    )


def test_sparse_features_under_autocast(graph, x):
    model = GAT(8, 16, 3, heads=2).eval()
    with torch.autocast("cpu", torch.bfloat16):
        sparse, dense = model(x.to_sparse_csr(), graph), model(x, graph)
    torch.testing.assert_close(sparse.float(), dense.float(), atol=0.05, rtol=0.05)
    layer = attnkit.GraphTransformer(8, 16, 3, num_layers=1, heads=2).eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.to_sparse_csr(), graph).isfinite().all()


def test_one_token_is_causal_however_it_is_aligned():
    block = attnkit.MultiHeadAttention(8, 2, normalizer="delta_rule").eval()
    token = torch.randn(2, 1, 8)
    expected = block(token, mask=attnkit.Causal())
    torch.testing.assert_close(block(token, mask=attnkit.Causal("bottom_right")), expected)


def test_a_cache_under_autocast_takes_what_positions_gave_in_float32():
    block = attnkit.MultiHeadAttention(8, 2).eval()
    token = torch.randn(2, 1, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = block.new_cache(2, 3)
        output = block(token, cache=cache, positions=lambda q, k: (q.float(), k.float()))
        expected = block(token)
    assert cache.key.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected)


def test_graphs_without_nodes_at_the_end(graph, x):
    model = attnkit.GraphTransformer(8, 16, 3, num_layers=1, heads=2, readout="graph").eval()
    batch = torch.zeros(NODES, dtype=torch.long)
    together = model(x, graph, batch=batch, num_graphs=3)
    assert together.shape == (3, 3)
    torch.testing.assert_close(together[:1], model(x, graph))


def test_rows_may_be_none_or_numpys():
    query = torch.randn(1, 2, 5, 4)
    everything = attnkit.attention_weights(query, query)
    assert attnkit.attention_weights(query, query, rows=[]).shape == (1, 2, 0, 5)
    torch.testing.assert_close(
        attnkit.attention_weights(query, query, rows=np.int64(3)), everything[:, :, 3:4]
    )


@pytest.mark.parametrize("score", ["gat", "gatv2", "scaled_dot", "cosine"])
@pytest.mark.parametrize("loops", [False, True])
def test_a_bias_is_added_to_the_scores(score, loops):
    torch.manual_seed(0)
    layer = GraphAttention(5, 3, 2, score=score, add_self_loops=loops).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    edge_index = torch.tensor([[0, 1, 2, 3, 4, 5, 5], [1, 1, 1, 4, 4, 5, 0]])
    bias = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    plain = layer.attention_weights(x, edge_index)
    # softmax(s + b) = softmax(s) e^b, normalized again; a self-loop that is added has no bias
    proper = edge_index[0] != edge_index[1] if loops else torch.ones(7, dtype=torch.bool)
    factors = torch.ones_like(plain)
    factors[:7] = torch.where(proper[:, None], bias.exp(), 1.0)
    target = torch.cat([edge_index[1], torch.arange(6)]) if loops else edge_index[1]
    raised = plain * factors
    totals = torch.zeros(6, 2, dtype=torch.float64).index_add(0, target, raised)
    expected = raised / totals.clamp(min=1e-300)[target]
    weights = layer.attention_weights(x, edge_index, edge_bias=bias)
    torch.testing.assert_close(weights, expected)
    output, (_, given) = layer(x, edge_index, return_attention_weights=True, edge_bias=bias)
    assert len(given) == int(proper.sum()) + 6 * loops
    shared = bias[:, :1].detach()
    torch.testing.assert_close(
        layer(x, edge_index, edge_bias=shared[:, 0]),
        layer(x, edge_index, edge_bias=shared.expand(-1, 2)),
    )
    towards = torch.randn_like(output)
    assert torch.autograd.gradcheck(
        lambda b: (layer(x, edge_index, edge_bias=b) * towards).sum(), bias, fast_mode=True
    )


@pytest.mark.parametrize("score", ["scaled_dot", "cosine", "gatv2", "gat"])
@pytest.mark.parametrize(
    ("channels", "options"),
    [
        (8, {"residual": True, "gate": True, "edge_dim": 3, "add_self_loops": True}),
        (8, {"separate_self": True, "concat": False}),
        ((8, 5), {"residual": True}),
    ],
    ids=["loops", "separate", "bipartite"],
)
def test_a_batch_with_one_graph(score, channels, options, graph):
    """[batch, nodes, channels], what PyG calls a static graph: as its items one by one."""
    torch.manual_seed(0)
    layer = GraphAttention(channels, 4, heads=2, score=score, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(3, NODES, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randn(3, 23, 5, dtype=torch.float64, requires_grad=True)
    inputs = (x,) if isinstance(channels, int) else (x, targets)
    edges = graph if len(inputs) == 1 else graph[:, graph[1] < 23]
    attr = torch.randn(edges.shape[1], 3).double() if "edge_dim" in options else None
    bias = torch.randn(edges.shape[1], 2).double()

    def run(*given):
        nodes = given if len(given) > 1 else given[0]
        y, (_, weights) = layer(nodes, edges, attr, None, True, edge_bias=bias)
        options = {"rows": slice(3, None), "heads": 1, "edge_bias": bias}
        chosen = layer.attention_weights(nodes, edges, attr, **options)
        return y, weights, chosen

    batch = run(*inputs)
    items = [torch.stack(part) for part in zip(*map(run, *inputs), strict=True)]
    for actual, expected in zip(batch, items, strict=True):
        assert expected.std() > 0.01
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(part[0].square().sum(), inputs) for part in (batch, items))
    )


def test_a_batch_with_one_graph_in_every_form(graph, x):
    """Edges with fewer targets, targets without features, a sparse matrix; and what is refused."""
    batch = torch.stack([x, x.flip(0)])
    few = Edges(graph[:, graph[1] < 23], (NODES, 23))
    layer = GraphAttention((8, 5), 4, heads=2, score="gat", add_self_loops=False)
    expected = torch.stack([layer((item, None), few) for item in batch])
    torch.testing.assert_close(layer((batch, None), few), expected)
    layer = GraphAttention(8, 4, heads=2)
    torch.testing.assert_close(layer(batch, few), torch.stack([layer(y, few) for y in batch]))
    matrix = torch.sparse_coo_tensor(graph.flip(0), torch.ones(graph.shape[1]), (NODES, NODES))
    _, (whole, weights) = layer(batch, matrix, return_attention_weights=True)
    for number, item in enumerate(batch):
        _, (alone, _) = layer(item, matrix, return_attention_weights=True)
        torch.testing.assert_close(whole.to_dense()[..., number], alone.to_dense())
    assert list(weights.shape) == [2, graph.shape[1], 2]
    with pytest.raises(ValueError, match=r"x: expected sources and targets of one batch, got \[2"):
        GraphAttention((8, 8), 4)((batch, x), graph)
    for wrong in (x[0], batch[None], batch.to_sparse()):
        with pytest.raises(ValueError, match=r"x: expected \[nodes, channels\], got"):
            layer(wrong, graph)
