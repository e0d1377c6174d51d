"""Attention over edges of several types: HGT, HAN, RGAT, and the edges that they share."""

import gc
import json
import re
import runpy
import weakref

import pytest
import torch
from layer_support import assert_named
from torch import nn
from torch_geometric.nn import HANConv

import attnkit
from attnkit import GAT, HANAttention, HGTAttention, RGATAttention, TypedEdges
from attnkit.core.masks.adjacency import Adjacency

SIZES = {"paper": 11, "author": 7, "venue": 3}
EDGES = {
    ("paper", "cites", "paper"): 41,
    ("author", "writes", "paper"): 29,
    ("paper", "written_by", "author"): 23,
}
METADATA = [*SIZES], [*EDGES]
MECHANISMS = ["across-relation", "within-relation"]


def rand(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def graph(channels=5):
    generator = torch.Generator().manual_seed(0)
    edges = {
        key: torch.stack(
            [torch.randint(SIZES[end], (count,), generator=generator) for end in key[::2]]
        )
        for key, count in EDGES.items()
    }
    return {name: rand(size, channels, seed=size) for name, size in SIZES.items()}, edges


def randomised(layer):
    for i, parameter in enumerate(layer.parameters()):
        parameter.data = 0.5 * rand(*parameter.shape, seed=i)
    return layer.eval()


def typed(kind, **options):
    return randomised(kind(5, 6, METADATA, heads=2, **options))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_hgt_is_its_formula(mechanism):
    """Written out edge by edge, for one node."""
    layer, (x, edges) = typed(HGTAttention, attention_mechanism=mechanism), graph()
    node = 4

    def heads_of(name, row):
        projected = layer.in_proj.layers[METADATA[0].index(name)](x[name][row])
        return projected.view(3, 2, 3)

    query, by_type = heads_of("paper", node)[0], []
    for place, key in enumerate(METADATA[1][:2]):
        scores, values = [], []
        for j in edges[key][0][edges[key][1] == node]:
            _, k, v = heads_of(key[0], j)
            k = torch.einsum("hi,hij->hj", k, layer.key_weight[place])
            scores.append((query * k).sum(1) * layer.prior[place] / 3**0.5)
            values.append(torch.einsum("hi,hij->hj", v, layer.value_weight[place]))
        by_type.append([torch.stack(scores), torch.stack(values)])
    if mechanism == "across-relation":
        by_type = [[torch.cat(parts) for parts in zip(*by_type, strict=True)]]
    gathered = sum(
        (scores.softmax(dim=0)[..., None] * values).sum(dim=0) for scores, values in by_type
    )
    expected = layer.out_proj.layers[0](nn.functional.gelu(gathered.flatten()))
    output = layer(x, edges)
    torch.testing.assert_close(output["paper"][node], expected)
    assert {name: [*rows.shape] for name, rows in output.items()} == {
        "paper": [11, 6],
        "author": [7, 6],
    }


@pytest.mark.parametrize(
    ("kind", "mechanism"),
    [*((HGTAttention, mechanism) for mechanism in MECHANISMS), (HANAttention, MECHANISMS[1])],
)
def test_weights_sum_to_one_across_or_within_types(kind, mechanism):
    options = {"attention_mechanism": mechanism} if kind is HGTAttention else {}
    layer, (x, edges) = typed(kind, **options), graph()
    weights = layer.attention_weights(x, edges)
    key, typed_edges = ("author", "writes", "paper"), TypedEdges(edges, SIZES)
    rows = typed_edges.of_sources(key, x["author"])
    torch.testing.assert_close(typed_edges.of_sources([*key], x["author"]), rows)
    with attnkit.capture_attention(layer, rows=[50, 3], heads=1) as captured:
        layer(x, edges)
    assert torch.equal(captured[""][0], weights[[50, 3], 1:])
    totals = {}
    for key, rows in typed_edges.by_type(weights).items():
        kept = key if mechanism == "within-relation" else key[2]
        sums = torch.zeros(SIZES[key[2]], 2, dtype=torch.float64)
        totals[kept] = totals.get(kept, 0) + sums.index_add(0, edges[key][1], rows)
    for sums in totals.values():
        torch.testing.assert_close(sums[sums > 0], torch.ones_like(sums[sums > 0]))


@pytest.mark.parametrize("kind", [HGTAttention, HANAttention])
def test_one_attention_for_all_types(kind):
    """Prepared edges give the same; types may lack; what a node has no part in changes nothing."""
    layer, (x, edges) = typed(kind), graph()
    prepared = TypedEdges(edges, SIZES)
    with attnkit.record_backends() as ran:
        expected = layer(x, prepared)
    assert ran.total().total() == 1
    output = layer(x, edges)
    torch.testing.assert_close(output["paper"], expected["paper"])
    citing, writes, written = EDGES
    fewer = {citing: edges[citing], written: edges[written]}
    nodes = {name: rows for name, rows in x.items() if name != "venue"}
    alone = layer(nodes, fewer)
    torch.testing.assert_close(alone["author"], expected["author"])
    assert not torch.allclose(alone["paper"], expected["paper"])
    none = {writes: edges[writes][:, :0]}
    assert layer(x, none)["paper"].isfinite().all()


@pytest.mark.parametrize("kind", [HGTAttention, HANAttention])
def test_channels_that_the_first_input_tells(kind):
    _, edges = graph()
    x = {name: rand(size, 4 + size) for name, size in SIZES.items()}
    layer = kind({"paper": -1, "author": 11, "venue": -1}, 6, METADATA, heads=2).double()
    output = layer(x, edges)
    assert output["paper"].shape == (11, 6)
    assert layer.in_proj.layers[0].weight.shape[1] == 15
    sum(rows.sum() for rows in output.values() if rows is not None).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    with pytest.raises(ValueError, match=r"x_dict: expected \[nodes, 15\] of 'paper', got \[11, 3"):
        layer(x | {"paper": rand(11, 3)}, edges)


def test_nodes_of_as_many_channels_are_added():
    layer, (x, edges) = typed(HGTAttention), graph(channels=5)
    wide = randomised(HGTAttention({"paper": 6, "author": 5, "venue": 5}, 6, METADATA, heads=2))
    x["paper"] = rand(11, 6)
    before = wide(x, edges)["paper"]
    wide.skip.data.fill_(-1e9)
    torch.testing.assert_close(wide(x, edges)["paper"], x["paper"])
    wide.skip.data.fill_(1e9)
    assert not torch.allclose(wide(x, edges)["paper"], before)
    assert layer.skip.shape == (3,)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_relations_of_one_type_are_gat(mechanism):
    """With one relation and Q and K that read each head alone, RGAT is GAT."""
    edge_index = graph()[1]["paper", "cites", "paper"]
    theirs = randomised(attnkit.GraphAttention(5, 4, 3, score="gat"))
    layer = RGATAttention(5, 4, 1, heads=3, attention_mechanism=mechanism).double()
    projections = theirs.projections
    layer.weight.data = projections.value_proj.weight.T[None]
    layer.query_weight.data = torch.block_diag(*projections.query_vector[:, None]).T.contiguous()
    layer.key_weight.data = torch.block_diag(*projections.key_vector[:, None]).T.contiguous()
    layer.bias.data = theirs.out_bias
    x, types = rand(11, 5), torch.zeros(41, dtype=torch.long)
    torch.testing.assert_close(layer(x, edge_index, types), theirs(x, edge_index))


@pytest.mark.parametrize("make", [
    lambda: (HGTAttention(5, 6, METADATA, 2, dropout_p=0.5), graph()),
    lambda: (HANAttention(5, 6, METADATA, 2, dropout_p=0.5), graph()),
    lambda: (RGATAttention(5, 3, 4, heads=2, dropout_p=0.5),
             (rand(11, 5), torch.randint(11, (2, 40)), torch.randint(4, (40,)))),
], ids=["HGT", "HAN", "RGAT"])  # fmt: skip
def test_dropout_and_reset(make):
    torch.manual_seed(0)
    layer, given = make()
    layer = layer.double()

    def output():
        found = layer(*given)
        return found if isinstance(found, torch.Tensor) else found["paper"]

    assert not torch.equal(output(), output())
    layer.eval()
    before = output()
    assert torch.equal(before, output())
    layer.reset_parameters()
    assert not torch.allclose(before, output())


EDGE, KEY = torch.zeros(2, 1, dtype=torch.long), METADATA[1][0]


def hgt(*given, **options):
    layer = HGTAttention(**{"in_channels": 5, "out_channels": 6, "metadata": METADATA, **options})
    return layer(*given) if given else layer


def han(*given, **options):
    layer = HANAttention(**{"in_channels": 5, "out_channels": 6, "metadata": METADATA, **options})
    return layer.double()(*given) if given else layer


def rgat(*given, **options):
    layer = RGATAttention(5, 4, 2, **options)
    return layer.double()(*given) if given else layer


MULTIPLICATIVE = {"attention_mode": "multiplicative-self-attention", "negative_slope": 0.1}
WRONG = [
    (lambda: TypedEdges({}, SIZES), "ValueError: edge_index: expected at least one edge type"),
    (
        lambda: TypedEdges({"cites": EDGE}, SIZES),
        "ValueError: .*expected .source, relation, target",
    ),
    (
        lambda: TypedEdges({("paper", "in", "book"): EDGE}, SIZES),
        r"ValueError: .*'book'\) joins nodes of type 'book', expected one of 'paper', 'author'",
    ),
    (
        lambda: TypedEdges({KEY: EDGE + 11}, SIZES),
        r"IndexError: .*from 11 to 11, expected 0 to 10, for the edge type \('paper', 'cites'",
    ),
    (lambda: TypedEdges({KEY: EDGE}, 11), "TypeError: .*two dicts, or a tensor"),
    (lambda: TypedEdges({KEY: EDGE}, SIZES, EDGE[0]), "ValueError: .*the keys of edge_index"),
    (lambda: TypedEdges(EDGE, 11), "ValueError: edge_type and num_types: expected a type for each"),
    (lambda: TypedEdges(EDGE, 11, EDGE, 2), r"ValueError: .*expected integers \[1 edges\], got"),
    (lambda: TypedEdges(EDGE, 11, EDGE[0] + 2, 2), "IndexError: .*from 2 to 2, expected 0 to 1"),
    (lambda: hgt(out_channels=7, heads=2), "ValueError: heads: 2 does not divide out_channels 7"),
    (
        lambda: hgt(attention_mechanism="all"),
        "ValueError: .*expected 'across-relation' or 'within-relation', got 'all'",
    ),
    (
        lambda: han(in_channels={"paper": 5}),
        "ValueError: in_channels: expected a number for each of 'paper', 'author', 'venue', got",
    ),
    (lambda: han(in_channels=0), "ValueError: in_channels: expected at least 1"),
    (lambda: han(negative_slope=-1), "ValueError: negative_slope"),
    (
        lambda: hgt({"book": rand(2, 5)}, {}),
        "ValueError: x_dict: expected node types of the layer, 'paper', .*'venue', got 'book'",
    ),
    (
        lambda: hgt({"paper": rand(11)}, {}),
        r"ValueError: x_dict: .*channels\] of 'paper', got \[11",
    ),
    (
        lambda: han(graph()[0], {("paper", "quotes", "paper"): EDGE}),
        "ValueError: .*expected edge types of the layer, got .*quotes', 'paper'",
    ),
    (
        lambda: han(graph()[0], TypedEdges({KEY: EDGE}, {"paper": 11})),
        "ValueError: .*expected TypedEdges between the nodes of x_dict",
    ),
    (lambda: rgat(dim=2), "ValueError: dim: expected 1 for additive"),
    (lambda: rgat(num_bases=2, num_blocks=1), "ValueError: .*expected one of them, got 2 and 1"),
    (lambda: rgat(num_blocks=2), "ValueError: num_blocks: 2 does not divide"),
    (lambda: rgat(**MULTIPLICATIVE), "ValueError: negative_slope: only additive .*got 0.1"),
    (lambda: rgat(rand(11, 3), EDGE), r"ValueError: x: expected \[nodes, 5"),
    (lambda: rgat(rand(11, 5), EDGE), "ValueError: .*expected a type for each"),
    (
        lambda: rgat(rand(11, 5), TypedEdges(EDGE, 11, EDGE[0], 3)),
        "ValueError: .*of 11 nodes and 2 types, and no edge_type, got 11 nodes and 3 types",
    ),
    (
        lambda: rgat(rand(11, 5), EDGE, EDGE[0], rand(1, 2)),
        "ValueError: edge_attr: expected None, since the layer",
    ),
    (
        lambda: rgat(rand(11, 5), EDGE, EDGE[0], edge_dim=2),
        r"ValueError: edge_attr: expected \[edges, 2\], got None",
    ),
    (
        lambda: rgat(rand(11, 5), EDGE, EDGE[0], rand(3, 2), edge_dim=2),
        r"ValueError: edge_attr: expected \[edges, edge_dim\] = \[1, 2\], got \[3, 2\]",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_named(call, message):
    assert_named(call, message)


@pytest.mark.slow
def test_the_example_learns_which_edges_count(repository, capsys):
    example = runpy.run_path(str(repository / "docs" / "examples" / "typed_graph.py"))
    assert example["main"]() > 0.9
    told = re.findall(r"(\w+ \w+ \w+): ([\d.]+) of the edges, ([\d.]+)", capsys.readouterr().out)
    shares = {name: (float(edges), float(weight)) for name, edges, weight in told}
    edges, weight = shares["venue prints paper"]
    assert weight > 2 * edges
    assert sum(weight for _, weight in shares.values()) == pytest.approx(1, abs=0.02)


TAKES_METADATA = {
    "HGTAttention": lambda metadata: HGTAttention(5, 6, metadata, heads=2),
    "HANAttention": lambda metadata: HANAttention(5, 6, metadata, heads=2),
    "to_hetero": lambda metadata: attnkit.interop.to_hetero(
        GAT((5, 5), 8, 6, num_layers=1, add_self_loops=False), metadata
    ),
    "from_pyg": lambda metadata: attnkit.interop.from_pyg(HANConv(5, 6, metadata, 2)),
}


@pytest.mark.parametrize("name", TAKES_METADATA)
def test_metadata_of_a_json_file_is_that_of_pyg(name):
    """JSON has no tuples: edge types are lists."""
    metadata = ["paper", "author"], [*EDGES]
    layer, read = (
        randomised(TAKES_METADATA[name](given)).double()
        for given in (metadata, json.loads(json.dumps(metadata)))
    )
    x, edges = graph()
    del x["venue"]
    expected, actual = layer(x, edges), read(x, edges)
    assert expected.keys() == actual.keys()
    for key, nodes in expected.items():
        torch.testing.assert_close(actual[key], nodes)


@pytest.mark.parametrize("name", ["HGTAttention", "HANAttention", "to_hetero"])
@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([*EDGES], r"metadata: expected \(node types, edge types\), as data.metadata\(\) returns"),
        (([*SIZES], [["paper", "cites"]]), "metadata: expected .source, relation, target., got"),
        (([*SIZES], ["paper__cites__paper"]), "metadata: expected .source, relation, target., got"),
        (([*SIZES], [["paper", "cites", "book"]]), "metadata: .* joins nodes of type 'book', exp"),
    ],
)
def test_metadata_of_another_form_is_refused(name, metadata, message):
    with pytest.raises(ValueError, match=message):
        TAKES_METADATA[name](metadata)


class Layers(nn.Module):
    """Two layers and what they are given, all tensors of their own."""

    def __init__(self, kind, **options):
        super().__init__()
        x, edges = graph(channels=6)
        self.x, self.edges = x["paper"], edges
        if kind is RGATAttention:
            layers = [kind(6, 3, 3, heads=2, **options) for _ in range(2)]
            self.types = torch.arange(41) % 3
        else:
            self.x, self.types = x, None
            layers = [kind(6, 6, METADATA, heads=2, **options) for _ in range(2)]
        self.layers = nn.ModuleList(randomised(layer) for layer in layers)

    @property
    def tensors(self):
        """The first owns what is remembered."""
        edges = [*self.edges.values()]
        return edges if self.types is None else [self.types, edges[0]]

    def given(self):
        if self.types is None:
            return ({**self.edges},)
        return self.edges["paper", "cites", "paper"], self.types

    def anew(self):
        """The outputs of tensors that nobody has seen."""
        given = [
            {key: edges.clone() for key, edges in part.items()}
            if isinstance(part, dict)
            else part.clone()
            for part in self.given()
        ]
        return self(*given)

    def forward(self, *given):
        x = self.x
        for layer in self.layers:
            found = layer(x, *given)
            if isinstance(x, dict):
                found = {name: found.get(name) for name in x}
                found = {name: x[name] if rows is None else rows for name, rows in found.items()}
            x = found
        return torch.cat([*x.values()]) if isinstance(x, dict) else x


KINDS = [HGTAttention, HANAttention, RGATAttention]
WRITES = {
    "in place": lambda tensor, new: tensor.copy_(new),
    "numpy": lambda tensor, new: tensor.numpy().__setitem__(..., new.numpy()),
    "set": lambda tensor, new: tensor.set_(new.clone()),
}


@pytest.fixture
def sorts(monkeypatch):
    """What was sorted."""
    given = []

    def count(*arguments, of=Adjacency.of):
        given.append(arguments)
        return of(*arguments)

    monkeypatch.setattr(Adjacency, "of", count)
    return given


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_steps_sort_once(kind, mode, sorts):
    model = Layers(kind, backend="edges")
    with mode():
        outputs = [model(*model.given()) for _ in range(3)]
        prepared = TypedEdges(model.edges, SIZES)
        prepared.mask("across-relation"), prepared.mask("within-relation")
    outputs.append(model(*model.given()))  # trained on what inference sorted
    outputs[-1].sum().backward()
    assert len(sorts) == 1
    if model.types is None:  # also where the user prepared the edges
        model(prepared).sum().backward()
    for output in outputs:
        assert torch.equal(output, model.anew())


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", KINDS)
def test_edges_that_are_written_to_are_read_anew(kind, write):
    model = Layers(kind)
    for place in range(len(model.tensors)):
        before = model(*model.given())
        tensor = model.tensors[place]
        WRITES[write](tensor, tensor.flip(-1).roll(1, -1) % 3)
        for _ in range(2):
            output = model(*model.given())
        assert not torch.allclose(output, before)
        assert torch.equal(output, model.anew())
    edges = model.edges["paper", "cites", "paper"]
    edges.numpy()[0, 3] = 11
    with pytest.raises(IndexError, match="edge_index: the source nodes go from 0 to 11"):
        model(*model.given())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_remembered_goes_with_the_first_tensor(kind, monkeypatch):
    model, made = Layers(kind), []
    read = TypedEdges.__init__

    def note(edges, *given):
        made.append(weakref.ref(edges))
        read(edges, *given)

    monkeypatch.setattr(TypedEdges, "__init__", note)
    for _ in range(2):
        model(*model.given())
    assert [each() is not None for each in made] == [True]
    gc.disable()  # at once, without looking for circles
    try:
        if model.types is None:
            del model.edges[next(iter(EDGES))]
        else:
            del model.types
        assert made[0]() is None
    finally:
        gc.enable()


def test_other_types_sizes_and_layouts_are_others(sorts):
    layer, (x, edges) = typed(HGTAttention, backend="edges"), graph()
    citing, writes, _ = EDGES
    sparse = {key: torch.zeros(11, size) for key, size in ((citing, 11), (writes, 7))}
    for key, matrix in sparse.items():
        source, target = edges[key]
        matrix[target, source] = 1
        sparse[key] = matrix.to_sparse_csr()
    more = x | {"paper": rand(13, 5)}
    for nodes, given in [
        (x, edges),
        (more, edges),
        (x, {citing: edges[citing]}),
        (x, {writes: edges[writes], citing: edges[citing]}),
        (x, sparse),
    ]:
        number = len(sorts)
        outputs = [layer(nodes, given)["paper"] for _ in range(2)]
        assert len(sorts) == number + 1
        anew = {key: rows.clone() for key, rows in given.items()}
        assert torch.equal(outputs[1], layer(nodes, anew)["paper"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)  # what remembers is one, in typed_edges.py
def test_programs_remember_nothing(kind):
    model = Layers(kind, backend="edges")
    expected = model(*model.given())
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(*model.given()), expected)
    first = model.tensors[0]
    first.copy_(first.flip(-1) % 3)
    torch.testing.assert_close(compiled(*model.given()), model.anew())


@pytest.mark.gpu
def test_on_a_gpu_no_tensor_gets_the_address_of_another():
    layer, (x, edges) = typed(HGTAttention), graph()
    layer, x = layer.cuda(), {name: rows.cuda() for name, rows in x.items()}
    edges = {key: rows.cuda() for key, rows in edges.items()}
    for seed in range(5):
        key = [*EDGES][1]
        edges[key] = None  # gone before the next comes
        edges[key] = (torch.arange(58).view(2, 29) * (seed + 1) % 7).cuda()
        output = layer(x, edges)["paper"]
        anew = layer(x, {key: rows.clone() for key, rows in edges.items()})["paper"]
        torch.testing.assert_close(output, anew)
