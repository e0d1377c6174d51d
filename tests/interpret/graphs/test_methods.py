"""Edges explained, against autograd through masks, against leaving edges out, and ours against
PyG's layers with the same weights."""

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

import attnkit

NODES, CHANNELS, HEADS, DIM, CLASSES, INDEX = 23, 5, 3, 7, 4, 11


def explain(model, inputs, index=None, target=None, method="relevance", **options):
    return attnkit.explain(model, inputs, target, method, index=index, **options)


class Two(nn.Module):
    """Two layers of attention; the same weights as PyG's layers or as ours."""

    def __init__(self, convolution=pyg.GATv2Conv, loops=True):
        super().__init__()
        self.first = convolution(CHANNELS, DIM, HEADS, add_self_loops=loops)
        self.last = convolution(HEADS * DIM, CLASSES, HEADS, concat=False, add_self_loops=loops)

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).tanh(), edge_index)


@pytest.fixture
def graph():
    """A sparse graph with edges given twice and loops, in no order."""
    torch.manual_seed(1)
    edges = torch.randint(NODES, (2, 37))
    edges[:, 5], edges[:, 17] = edges[:, 9], INDEX
    edges[1, :3] = INDEX
    return torch.randn(NODES, CHANNELS), edges


def randomized(model):
    torch.manual_seed(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.eval()


def without_loops(graph):
    x, edges = graph
    return x, edges[:, edges[0] != edges[1]]


@pytest.mark.parametrize("loops", [False, True])
def test_the_gradient_of_a_factor_on_messages_is_that_of_pygs_mask(graph, loops):
    x, edges = without_loops(graph)
    model = randomized(Two(loops=loops))
    mask = torch.ones(edges.shape[1], requires_grad=True)
    set_masks(model, mask, edges, apply_sigmoid=False)
    (gradient,) = torch.autograd.grad(model(x, edges)[INDEX, 2], mask)
    clear_masks(model)
    found = explain(model, (x, edges), INDEX, 2, "input_gradient")
    torch.testing.assert_close(found.edges, gradient.abs(), atol=1e-5, rtol=1e-4)
    assert gradient.any()


def test_explanations_are_the_same_of_ours_and_of_pygs_layers(graph):
    """∂y/∂α by autograd through PyG's α, and by (∂y/∂output) · value of ours."""
    model, ours = randomized(Two()), Two()
    ours.first = attnkit.interop.from_pyg(model.first)
    ours.last = attnkit.interop.from_pyg(model.last)
    for method in ("relevance", "input_gradient", "occlusion", "attention"):
        theirs, found = (explain(m, graph, INDEX, None, method) for m in (model, ours))
        torch.testing.assert_close(found.edges, theirs.edges, atol=1e-5, rtol=1e-4)
        assert float(found.share) == pytest.approx(float(theirs.share), abs=1e-5)
        assert found.edges.any()
        assert found.target == theirs.target == int(model(*graph)[INDEX].argmax())


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("convolution", [pyg.GATConv, pyg.GATv2Conv])
def test_the_gradient_of_a_removal_is_occlusion_where_the_answer_is_linear(loops, convolution):
    """One layer, whose output is the answer: then first order is all there is, also for a node of
    one edge and for an edge that has all the attention."""
    torch.manual_seed(3)
    edges = torch.tensor([[1, 2, 3, 4, 2, 4], [0, 0, 0, 0, 3, 0]])
    x = torch.randn(5, CHANNELS) * 3
    model = randomized(convolution(CHANNELS, CLASSES, HEADS, concat=False, add_self_loops=loops))
    for layer in (model, attnkit.interop.from_pyg(model)):
        for index, count in ((0, 5), (3, 1)):
            lost = explain(layer, (x, edges), index, 2, "occlusion").edges
            found = explain(layer, (x, edges), index, 2, "removal_gradient").edges
            torch.testing.assert_close(found, lost.abs(), atol=1e-4, rtol=1e-4)
            assert int((found > 1e-3).sum()) == count


def test_relevance_is_the_positive_part_of_gradient_times_attention(graph):
    """The layers written out, with explicit weights."""
    x, edges = without_loops(graph)
    model = randomized(Two(loops=False))
    source, target = edges

    def layer(conv, x, alpha):
        value = conv.lin_l(x).view(NODES, HEADS, -1)
        message = value[source] * alpha[:, :, None]
        return torch.zeros(NODES, HEADS, value.shape[2]).index_add(0, target, message)

    first = model.first(x, edges, return_attention_weights=True)[1][1]
    hidden = (layer(model.first, x, first).flatten(1) + model.first.bias).tanh()
    last = model.last(hidden, edges, return_attention_weights=True)[1][1]
    logits = layer(model.last, hidden, last).mean(dim=1) + model.last.bias
    torch.testing.assert_close(logits, model(x, edges), atol=1e-5, rtol=1e-4)
    gradients = torch.autograd.grad(logits[INDEX, 1], [first, last])
    parts = [
        (gradient * alpha).clamp(min=0).mean(dim=1).detach()
        for gradient, alpha in zip(gradients, (first, last), strict=True)
    ]
    found = explain(model, (x, edges), INDEX, 1)
    torch.testing.assert_close(found.edges, parts[0] + parts[1], atol=1e-5, rtol=1e-4)
    only = explain(model, (x, edges), INDEX, 1, layers="last")
    torch.testing.assert_close(only.edges, parts[1], atol=1e-5, rtol=1e-4)


def test_occlusion_is_what_y_loses_without_the_edge(graph):
    x, edges = graph
    model = randomized(Two())
    found = explain(model, graph, INDEX, 3, "occlusion")
    whole = model(x, edges)[INDEX, 3]
    for edge in range(edges.shape[1]):
        kept = torch.arange(edges.shape[1]) != edge
        lost = whole - model(x, edges[:, kept])[INDEX, 3]
        assert float(found.edges[edge]) == pytest.approx(float(lost), abs=1e-5)
        assert found.candidates[edge] or abs(lost) < 1e-6
    assert found.is_signed
    assert bool((found.edges < 0).any())


def test_attention_is_that_of_the_last_layer_into_the_node(graph):
    x, edges = graph
    model = randomized(Two())
    found = explain(model, graph, INDEX, method="attention")
    hidden = model.first(x, edges).tanh()
    _, (used, alpha) = model.last(hidden, edges, return_attention_weights=True)
    into = (used[1] == INDEX) & (used[0] != INDEX)
    proper = (edges[1] == INDEX) & (edges[0] != INDEX)
    torch.testing.assert_close(found.edges[proper], alpha[into].mean(dim=1))
    assert not found.edges[~proper].any()
    assert found.share == pytest.approx(1 - float(found.edges.sum()), abs=1e-6)
    both = explain(model, graph, INDEX, method="attention", layers=["first", "last"])
    assert int((both.edges > 0).sum()) > int(proper.sum())
    assert not both.edges[~both.candidates].any()


def test_random_edges_can_reach_the_node(graph):
    model = randomized(Two())
    found, again, other = (
        explain(model, graph, INDEX, method="random", seed=seed).edges for seed in (0, 0, 1)
    )
    assert torch.equal(found, again)
    assert not torch.equal(found, other)
    candidates = explain(model, graph, INDEX).candidates
    assert torch.equal(found > 0, candidates)
    assert 3 < int(candidates.sum()) < 37


def test_attention_between_all_nodes_leaves_no_edge_out(graph):
    model = attnkit.GraphTransformer(CHANNELS, 12, CLASSES, heads=3, num_layers=1)
    assert explain(randomized(model), graph, INDEX).candidates.all()


def test_inputs_of_other_kinds(graph):
    x, edges = graph
    model = randomized(attnkit.GAT(CHANNELS, 12, CLASSES, heads=3, edge_dim=2))
    features = torch.randn(37, 2)
    one = explain(model, (x, edges, features), INDEX, 1, "occlusion")
    named = {"x": x, "edge_index": attnkit.Edges(edges, NODES), "edge_attr": features}
    other = explain(model, named, INDEX, 1, "occlusion")
    assert torch.equal(one.edges, other.edges)
    kept = torch.arange(37) != 2
    lost = model(x, edges, features)[INDEX, 1] - model(x, edges[:, kept], features[kept])[INDEX, 1]
    assert float(one.edges[2]) == pytest.approx(float(lost), abs=1e-6)
    assert float(one.edges[2]) != 0


class Pooled(Two):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index).mean(dim=0, keepdim=True)


def test_a_graph_is_explained_without_an_index(graph):
    x, edges = graph
    model = randomized(Pooled())
    found = explain(model, graph, target=1)
    assert found.candidates.all()
    assert (found.edges > 0).sum() > 15
    lost = explain(model, graph, target=1, method="occlusion").edges
    expected = model(x, edges)[0, 1] - model(x, edges[:, 1:])[0, 1]
    assert float(lost[0]) == pytest.approx(float(expected), abs=1e-6)


def test_a_model_is_afterwards_as_it_was(graph):
    model = randomized(Two()).train()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    found = explain(model, graph, INDEX)
    assert found.edges.any()  # although all is frozen
    assert model.training
    with torch.inference_mode():
        again = explain(model, graph, INDEX)
    assert torch.equal(found.edges, again.edges)
    assert not graph[0].requires_grad


def test_what_is_printed_and_saved(graph, tmp_path):
    found = explain(randomized(Two()), graph, INDEX)
    lines = str(found).splitlines()
    assert lines[0].startswith(f"relevance of node 11: class {found.target} (predicted), p = ")
    assert lines[1].split() == ["edge", "score", "share", "steps"]
    source, target = graph[1][:, int(found.edges.argmax())].tolist()
    assert lines[2].split()[:3] == [str(source), "→", str(target)]
    assert lines[7].startswith("Self-loops that layers added took ")
    assert lines[8].endswith("of 37 edges reach the node in 2 steps.")
    saved = torch.load(found.save(tmp_path / "seen.pt"))
    assert torch.equal(saved["edges"], found.edges)
    assert found.save(tmp_path / "seen.npz").exists()
    with pytest.raises(ValueError, match=r"path: expected \.png, .*or \.pt, got "):
        found.save(tmp_path / "seen.txt")


class Stopping(Two):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index).detach()


BAD = [
    ({}, {"index": None}, "index: expected one of the 23 nodes, got None"),
    ({}, {"index": 23}, "index: the model answers for 23 nodes, got 23"),
    ({}, {"index": -1}, "index: expected 0 or more, got -1"),
    ({}, {"index": 1.5}, r"index: expected an integer, got 1\.5"),
    ({}, {"target": torch.rand(3, 4)}, r"target: .* integer, got a tensor \[3, 4\] of"),
    ({}, {"target": 4}, "target: the model has 4 classes, expected 0 to 3, got 4"),
    ({}, {"num_hops": 0}, "num_hops: expected 1 or more, got 0"),
    ({}, {"method": "rollout"}, "method: expected one of attention, relevance, input_grad"),
    ({}, {"method": "attention", "target": 1}, "target: 'attention' gives the same map"),
    ({}, {"method": "occlusion", "layers": 1}, "layers: 'occlusion' does not use attention layers"),
    ({}, {"seed": 1}, "seed: 'relevance' of a graph has no options"),
    ({}, {"layers": "third"}, "layers: 'third' is none of the 2 attention layers"),
    ({"model": Stopping()}, {}, "model: Stopping stops the gradient"),
    ({}, {"grid": (3, 3)}, "grid: a graph has none"),
    ({}, {"method": torch.ones(3)}, "method: expected floating-point numbers"),
    ({"model": 3}, {}, r"model: expected a torch\.nn\.Module, got int"),
    ({"edges": torch.zeros(2, 0).long()}, {}, "inputs: a graph without edges"),
    ({"edges": torch.eye(3).to_sparse()}, {}, "inputs: expected edges, integers"),
]


@pytest.mark.parametrize(("changed", "options", "message"), BAD)
def test_wrong_arguments_are_named(graph, changed, options, message):
    model = changed.get("model") or randomized(Two())
    inputs = graph[0], changed.get("edges", graph[1])
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        explain(model, inputs, **{"index": INDEX, **options})


def test_numbers_of_somebody_else_are_taken(graph):
    scores = torch.randn(37)
    found = explain(randomized(Two()), graph, torch.tensor(INDEX), torch.tensor(2), scores)
    assert torch.equal(found.edges, scores)
    assert (found.index, found.target, found.method) == (INDEX, 2, "given")
    assert "random" in found.trust().verdict


def test_a_model_without_attention_is_occluded(graph):
    model = randomized(pyg.GraphConv(CHANNELS, CLASSES))
    with pytest.raises(ValueError, match="model: GraphConv has no attention"):
        explain(model, graph, INDEX)
    found = explain(model, graph, INDEX, method=None)
    assert found.method == "occlusion"
    assert found.edges.any()
    assert found.notes[-1].startswith("method 'occlusion', since 'relevance' does not serve")


def test_a_single_logit_has_the_probability_of_a_sigmoid(graph):
    model = randomized(pyg.GATv2Conv(CHANNELS, 1, HEADS, concat=False))
    seen = explain(model, graph, INDEX, method="occlusion")
    p = float(model(*graph)[INDEX, 0].sigmoid())
    assert p < 0.999
    assert seen.probability == pytest.approx(p)
    assert seen.trust().probability == pytest.approx(p)
    assert any(row["plus"] for row in seen.trust().rows)


class Texts(nn.Module):
    """As a BERT: token ids of texts, and of which segment each is."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, input_ids, token_type_ids=None):
        x = self.words(input_ids)
        return self.head(self.attention(x, x, x)[0][:, 0])


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("method", ["occlusion", None])
def test_texts_are_not_taken_for_edges(named, method):
    """Token ids of two texts are integers [2, n], as edges are."""
    ids = torch.randint(30, (2, 7))
    inputs = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)} if named else (ids,)
    message = r"^inputs: texts, as input_ids, are not explained; attnkit\.diagnose_attention .*"
    with pytest.raises(TypeError, match=message) as refused:
        explain(Texts(), inputs, method=method)
    assert "\n" not in str(refused.value)
    assert "attnkit.capture_attention" in str(refused.value)
    # what the message names does serve them
    model = Texts().eval()
    assert attnkit.diagnose_attention(model, {"input_ids": ids}).rows
    with attnkit.capture_attention(model) as weights:
        model(ids)
    assert list(weights["attention"][0].shape) == [2, 2, 7, 7]


def test_only_what_is_named_like_edges_is_edges(graph):
    x, edges = graph

    class Named(Two):
        def forward(self, features, my_edges, other=None):
            return super().forward(features, my_edges)

    model = randomized(Named())
    found = explain(model, {"features": x, "my_edges": edges}, INDEX, 1)
    assert torch.equal(found.edges, explain(model, (x, edges), INDEX, 1).edges)
    wide = {"features": x, "other": edges.flip(0), "my_edges": edges}
    assert torch.equal(explain(model, wide, INDEX, 1).edge_index, edges)
    with pytest.raises(TypeError, match=r"inputs: expected edges, .* named edge_index"):
        explain(model, {"features": x, "other": edges}, INDEX, 1)


def test_an_answer_that_no_feature_changes():
    """Its gradients are 0 everywhere, and so is what it loses without an edge."""

    class Nothing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pyg.GATv2Conv(4, 3)

        def forward(self, x, edge_index):
            return (self.conv(x, edge_index) - 100).relu()

    x, edge_index = torch.randn(11, 4), torch.randint(11, (2, 31))
    seen = attnkit.explain(
        Nothing(), (x, edge_index), index=int(edge_index[1, 0]), method="occlusion"
    )
    assert not seen.edges.any()
