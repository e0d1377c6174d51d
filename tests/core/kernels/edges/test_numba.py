"""The kernels for edges that numba compiles: against the definition in float64, in one thread and
in several, whatever the graph, and without memory of edges × channels."""

import os
import subprocess
import sys

import pytest
import torch
from edge_graphs import graphs, rand, random_graph, results
from support import Largest, with_third

import attnkit
from attnkit import Additive, Cosine, EdgeFeatures, Edges, Gaussian, General, attend
from attnkit.core.check import check_inputs
from attnkit.core.kernels.edges import numba as edges_numba
from attnkit.core.operators.cpu import Caches

BATCH, HEADS, VALUE_DIM, EDGE_DIM = 2, 3, 7, 11
SCORES = {
    "scaled_dot": (5, lambda: "scaled_dot", []),
    "general": (5, General, [(HEADS, 5, 5)]),
    "cosine": (13, lambda scale: Cosine(scale.abs() + 1), [(HEADS,)]),
    "gaussian": (5, lambda width: Gaussian(width.abs() + 1), [(HEADS,)]),
    "gatv2": (17, lambda vector: Additive(vector, "leaky_relu", 0.3), [(HEADS, 17)]),
    "relu": (5, lambda vector: Additive(vector, "leaky_relu", 0.0), [(5,)]),
    "gat": (1, lambda vector: Additive(vector, "leaky_relu", 0.2), [(HEADS, 1)]),
}


@pytest.fixture(params=["one task", "tasks"])
def computed_in(request, monkeypatch):
    """One thread and lanes where they stand; or a task for a few edges of one lane, on copies."""
    before = torch.get_num_threads()
    if request.param == "tasks":
        torch.set_num_threads(3)
        for name, value in (
            ("GROUP", 100),
            ("ALONE", 0),
            ("BLOCK", 7),
            ("FEW", 0),
            ("caches", lambda: Caches(0, 0)),
        ):
            monkeypatch.setattr(edges_numba, name, value)
    yield
    torch.set_num_threads(before)


def given(score, num_targets=11, num_sources=13, dtype=torch.float64):
    """Query, key, value and the score's parameters."""
    dim, make, shapes = SCORES[score]
    inputs = [
        rand(BATCH, HEADS, num_targets, dim, seed=1, dtype=dtype),
        rand(BATCH, HEADS, num_sources, dim, seed=2, dtype=dtype),
        rand(BATCH, HEADS, num_sources, VALUE_DIM, seed=3, dtype=dtype),
        *(rand(*shape, seed=4 + place, dtype=dtype) for place, shape in enumerate(shapes)),
    ]
    return inputs, lambda tensors: make(*tensors[3:])


def assert_is_the_definition(inputs, make_options):
    """Against the definition in float64, of numbers of float32, about as near to it as the
    definition in float32 is."""
    wide = [tensor.detach().float().double().requires_grad_() for tensor in inputs]
    expected = results(attend(*wide[:3], **make_options(wide), backend="reference"), wide)
    narrow = [tensor.detach().float().requires_grad_() for tensor in inputs]
    plain = results(attend(*narrow[:3], **make_options(narrow), backend="reference"), narrow)
    with attnkit.record_backends() as record:
        output = attend(*narrow[:3], **make_options(narrow), backend="edges_numba")
    assert record.total() == {"edges_numba": 1}
    size = max(tensor.abs().max() for tensor in expected)
    for ours, theirs, rounded in zip(results(output, narrow), expected, plain, strict=True):
        bound = 3 * (rounded - theirs).abs().max() + 2e-6 * size
        torch.testing.assert_close(ours.double(), theirs, atol=bound.item(), rtol=1e-5)
    return output


@pytest.mark.parametrize("score", ["scaled_dot", "gatv2", "gat"])
def test_a_table_that_is_key_and_value_is_copied_once(score, computed_in, monkeypatch):
    """As GATv2 has it; the same bits as of two tables, and of gat, whose tables differ in width."""
    names = []

    def count(job, name, shape, make=edges_numba._Job._buffer):
        names.append(name)
        return make(job, name, shape)

    monkeypatch.setattr(edges_numba._Job, "_buffer", count)
    edges, found = Edges(random_graph(11, 13, 53), 11, 13), {}
    for is_one in (True, False):
        inputs, make = given(score, dtype=torch.float32)
        query, key, _, *others = (tensor.detach().requires_grad_() for tensor in inputs)
        value = key if is_one else key.clone()
        options = {"score": make([query, key, value, *others]), "mask": edges}
        names.clear()
        output = attend(query, key, value, **options, backend="edges_numba")
        copied = {name for name in names if name in ("key", "value", "key_value")}
        output.square().sum().backward()
        found[is_one] = [output, query.grad, key.grad], copied
    for one, two in zip(found[True][0], found[False][0], strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-6)
    if edges_numba.FEW == 0:  # in tasks
        one = {"key"} if score != "gat" else {"key", "value"}
        assert found[True][1] == one
        assert found[False][1] == (one if score == "gat" else {"key_value"})


@pytest.mark.parametrize(
    ("graph", "score", "computed_in"),
    with_third(graphs(), SCORES, ("one task", "tasks")),
    indirect=["computed_in"],
)
def test_the_kernel_is_the_definition(graph, score, computed_in):
    inputs, make_score = given(score)
    mask = graphs()[graph]
    output = assert_is_the_definition(
        inputs, lambda tensors: {"mask": mask, "score": make_score(tensors)}
    )
    alone = ~torch.isin(torch.arange(11), mask.edge_index[1])
    assert (output[:, :, alone] == 0).all()


@pytest.mark.parametrize("score", ["scaled_dot", "general", "gatv2", "gat"])
@pytest.mark.parametrize(
    "reads", [set(c) for c in (("key",), ("value",), ("key", "value", "bias"))]
)
def test_what_edges_carry(score, reads, computed_in):
    inputs, make_score = given(score)
    mask, dim, num_own = graphs()["repeated"], SCORES[score][0], len(inputs)
    carried = {
        "features": rand(mask.num_edges, EDGE_DIM, seed=6),
        "key_weight": rand(HEADS, dim, EDGE_DIM, seed=7) if "key" in reads else None,
        "value_weight": rand(HEADS, VALUE_DIM, EDGE_DIM, seed=8) if "value" in reads else None,
        "bias": rand(mask.num_edges, HEADS, seed=9) if "bias" in reads else None,
    }
    names = [name for name, tensor in carried.items() if tensor is not None]

    def options(tensors):
        read = dict(zip(names, tensors[num_own:], strict=True))
        if "bias" in read:
            read["bias"] = read["bias"].T  # heads stand next to each other, as layers give them
        score = make_score(tensors[:num_own])
        return {"mask": mask, "score": score, "edge_features": EdgeFeatures(**read)}

    assert_is_the_definition([*inputs, *(carried[name] for name in names)], options)


@pytest.mark.parametrize("score", ["scaled_dot", "gatv2", "gat"])
def test_targets_of_many_edges_and_of_none(score, computed_in):
    """Degrees from 0 to far above the edges that are computed at once."""
    counts = torch.tensor([0, 1, 7, 8, 9, 63, 64, 65, 0, 127, 1021, 0])
    target = torch.arange(len(counts)).repeat_interleave(counts)
    source = torch.randint(13, (len(target),), generator=torch.Generator().manual_seed(0))
    shuffled = torch.randperm(len(target), generator=torch.Generator().manual_seed(1))
    mask = Edges(torch.stack([source, target])[:, shuffled], (13, len(counts)))
    inputs, make_score = given(score, num_targets=len(counts))
    assert_is_the_definition(inputs, lambda tensors: {"mask": mask, "score": make_score(tensors)})


@pytest.mark.parametrize("score", ["scaled_dot", "gatv2"])
def test_scores_that_differ_by_much(score):
    """Largest scores of ±1,000, and an edge that nobody may use: its bias is −∞."""
    inputs, make_score = given(score)
    inputs[0], inputs[1] = 30 * inputs[0], 30 * inputs[1]
    mask = graphs()["hub"]
    bias = torch.zeros(1, mask.num_edges, dtype=torch.float64)
    bias[0, ::3] = -torch.inf

    def options(tensors):
        carried = EdgeFeatures(bias=bias.to(tensors[0].dtype))
        return {"mask": mask, "score": make_score(tensors), "edge_features": carried}

    assert_is_the_definition(inputs, options)


def test_what_is_not_finite_stays_so():
    inputs, _ = given("scaled_dot", dtype=torch.float32)
    mask = graphs()["complete"]
    for broken in (torch.nan, torch.inf):
        query = inputs[0].detach().clone()
        query[0, 0, 2] = broken
        output = attend(query, *inputs[1:], mask=mask, backend="edges_numba")
        assert output[0, 0, 2].isnan().all()
        assert output[0, 0, 3:].isfinite().all()


@pytest.mark.parametrize("score", ["scaled_dot", "gatv2", "gat"])
def test_dropout_is_the_same_in_the_backward(score, computed_in):
    """The sum of values of 1 is that of the kept weights, and so is the gradient by the values."""
    inputs, make_score = given(score, dtype=torch.float32)
    mask, p = graphs()["complete"], 0.25
    ones = torch.ones_like(inputs[2]).requires_grad_()
    options = {"mask": mask, "score": make_score(inputs), "dropout_p": p}
    torch.manual_seed(5)
    output = attend(inputs[0], inputs[1], ones, **options, backend="edges_numba")
    by_value = torch.autograd.grad(output.sum(), ones)[0]
    torch.testing.assert_close(by_value.sum(dim=2), output.sum(dim=2), atol=1e-4, rtol=1e-4)
    assert output.std() > 0.05  # something was dropped, and not all the same
    # by finite differences, with the same draw
    direction = torch.randn_like(inputs[0])

    def loss(step):
        torch.manual_seed(5)
        moved = inputs[0] + step * direction
        return (
            attend(moved, inputs[1], ones, **options, backend="edges_numba").double().pow(2).sum()
        )

    slope = (torch.autograd.grad(loss(0.0), inputs[0])[0] * direction).sum().item()
    numeric = ((loss(1e-2) - loss(-1e-2)) / 2e-2).item()
    assert slope == pytest.approx(numeric, rel=2e-2, abs=1e-2)


def test_dropout_keeps_a_share_and_no_two_lanes_alike():
    count, p = 20_011, 0.3
    edges = Edges(torch.stack([torch.arange(count), torch.arange(count)]), count)
    query = torch.zeros(2, 3, count, 8)
    output = attend(query, query, query + 1, mask=edges, dropout_p=p, backend="edges_numba")
    is_kept = output[..., 0].flatten(0, 1) != 0
    torch.testing.assert_close(output[..., 0].unique(), torch.tensor([0, 1 / (1 - p)]))
    deviation = (p * (1 - p) / count) ** 0.5
    assert ((is_kept.double().mean(dim=1) - (1 - p)).abs() < 4 * deviation).all()
    both = (is_kept[:, None] & is_kept[None]).double().mean(dim=2)
    shares = both[~torch.eye(6, dtype=torch.bool)]
    assert ((shares - (1 - p) ** 2).abs() < 5 * deviation).all()
    neighbours = (is_kept[:, 1:] & is_kept[:, :-1]).double().mean(dim=1)
    assert ((neighbours - (1 - p) ** 2).abs() < 5 * deviation).all()
    again = attend(query, query, query + 1, mask=edges, dropout_p=p, backend="edges_numba")
    assert not torch.equal(again, output)


def test_the_same_to_the_bit_every_time(computed_in):
    inputs, make_score = given("gatv2", dtype=torch.float32)
    mask = Edges(random_graph(13, 11, 4001), 11, 13)
    options = {"mask": mask, "score": make_score(inputs), "backend": "edges_numba"}
    first, *others = (results(attend(*inputs[:3], **options), inputs) for _ in range(5))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lower_precision_is_computed_in_float32(dtype):
    inputs, _ = given("scaled_dot", dtype=dtype)
    mask = graphs()["some"]
    actual = attend(*inputs, mask=mask, backend="edges_numba")
    expected = attend(*(t.float() for t in inputs), mask=mask, backend="edges_numba").to(dtype)
    assert actual.dtype == dtype
    assert torch.equal(actual, expected)


def test_grouped_heads_strides_and_no_batch():
    query = rand(11, 4, 5, seed=1, dtype=torch.float32).transpose(0, 1)[..., :3]
    key = rand(13, 2, 3, seed=2, dtype=torch.float32).transpose(0, 1).flip(2)
    value = rand(1, 2, VALUE_DIM, seed=3, dtype=torch.float32).expand(13, -1, -1).transpose(0, 1)
    mask = graphs()["some"]
    actual = attend(query[None], key[None], value[None], mask=mask, backend="edges_numba")
    expected = attend(query[None], key[None], value[None], mask=mask, backend="reference")
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


def test_int32_edges_that_do_not_stand_together():
    pairs = torch.tensor([[0, 0], [2, 0], [1, 1], [3, 2]], dtype=torch.int32)
    inputs = [rand(1, 1, 4, 8, seed=seed, dtype=torch.float32) for seed in range(3)]
    actual = attend(*inputs, mask=Edges(pairs.T, 4), backend="edges_numba")
    expected = attend(*inputs, mask=Edges(pairs.T.long().contiguous(), 4), backend="reference")
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


def test_gradients_that_nobody_wants_are_not_there():
    inputs, _ = given("scaled_dot", dtype=torch.float32)
    query, key, value = (tensor.detach() for tensor in inputs)
    mask = graphs()["some"]
    for wanted in (query, value):
        wanted.requires_grad_()
        output = attend(query, key, value, mask=mask, backend="edges_numba")
        (found,) = torch.autograd.grad(output.sum(), wanted)
        (expected,) = torch.autograd.grad(
            attend(query, key, value, mask=mask, backend="reference").sum(), wanted
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        wanted.requires_grad_(False)


def test_nothing_of_edges_times_channels_is_made(monkeypatch):
    num_edges = 40_009
    mask = Edges(random_graph(13, 11, num_edges), 11, 13)
    inputs, make_score = given("gatv2", dtype=torch.float32)
    with Largest() as largest:
        options = {"mask": mask, "score": make_score(inputs), "dropout_p": 0.1}
        attend(*inputs[:3], **options, backend="edges_numba").square().sum().backward()
    lanes = BATCH * HEADS
    # two numbers for each edge and lane; a task of so few targets has all arguments of one lane
    assert largest.numel <= max(2 * lanes, 24 + 3) * num_edges + 10_000


def test_what_it_refuses():
    mask = Edges(torch.tensor([[0, 1], [1, 2]]), 4)
    refusals = [
        ({"dtype": torch.float64}, {}, "needs float32, bfloat16 or float16, got torch.float64"),
        ({}, {"score": Additive(torch.ones(8))}, "needs the activation 'leaky_relu', got 'tanh'"),
        ({"device": "meta"}, {}, "needs tensors on cpu, got meta"),
    ]
    for made, options, reason in refusals:
        tensor = torch.zeros(1, 2, 4, 8, **made)
        edges = mask.to("meta") if "device" in made else mask
        inputs = check_inputs(tensor, tensor, tensor, mask=edges, **options)
        assert reason in [*edges_numba.NumbaEdgesKernel().unsupported_reasons(inputs)]
    large = torch.zeros(1, 2, 4, 257)
    reasons = attnkit.explain_backends(large, large, large, mask=mask).reasons["edges_numba"]
    assert reasons == ["needs a head_dim of at most 256, got 257"]


def test_without_numba_torchs_operators_serve(monkeypatch):
    query = torch.randn(1, 2, 50, 8)
    mask = Edges(torch.randint(50, (2, 60)), 50)
    assert attnkit.explain_backends(query, query, query, mask=mask).chosen == "edges_numba"
    monkeypatch.setattr(edges_numba, "_is_there", lambda: False)
    explanation = attnkit.explain_backends(query, query, query, mask=mask)
    assert explanation.reasons["edges_numba"] == ["needs numba"]
    assert explanation.chosen == "edges"


def test_tracing_is_refused():
    """torch.jit.trace would take what the kernels write for a constant."""
    mask, reasons = Edges(torch.randint(50, (2, 60)), 50), []

    def function(query):
        reasons.extend(
            attnkit.explain_backends(query, query, query, mask=mask).reasons["edges_numba"]
        )
        return query + 1

    torch.jit.trace(function, torch.randn(1, 2, 50, 8), check_trace=False)
    assert reasons == ["cannot be traced by torch"]


def test_a_wide_dot_product_is_left_to_torch():
    mask = Edges(torch.randint(500, (2, 600)), 500)
    for dim, expected in ((32, "edges_numba"), (33, "edges")):
        query = torch.randn(1, 2, 500, dim)
        assert attnkit.explain_backends(query, query, query, mask=mask).chosen == expected


def test_a_second_derivative_is_refused():
    inputs, _ = given("scaled_dot", dtype=torch.float32)
    output = attend(*inputs, mask=graphs()["some"], backend="edges_numba")
    with pytest.raises(RuntimeError, match="'edges_numba' has no second derivative"):
        torch.autograd.grad(output.sum(), inputs[0], create_graph=True)


SCRIPT = """
import os, sys, torch, attnkit
from attnkit.core.kernels.edges.numba_kernels import kernels
query = torch.randn(1, 2, 5, 8)
mask = attnkit.Edges(torch.randint(5, (2, 7)), 5)
attnkit.attend(query, query, query, mask=mask, backend="edges_numba")
"""


def run(script, **environment):
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_programs_are_kept_where_a_folder_can_be_written_to(tmp_path):
    """Else the kernels are compiled for this process alone."""
    tell = SCRIPT + "print(type(kernels(True, 8, 8)[0]._cache).__name__)\n"
    done = run(tell, NUMBA_CACHE_DIR=str(tmp_path / "kept"))
    assert done.stdout == "FunctionCache\n", done.stderr
    assert [*(tmp_path / "kept").rglob("*.nbi")]
    nowhere = "import numba.core.caching as c\nc.FunctionCache._impl_class._locator_classes = []\n"
    done = run(nowhere + tell)
    assert done.stdout == "NullCache\n", done.stderr


def test_fewer_queries_than_keys_of_one_projection():
    """Their gradients have no common rows, though they begin side by side."""
    edges = attnkit.Edges(torch.randint(5, (2, 90), generator=torch.manual_seed(0)), (30, 5))
    results = []
    for backend in ("edges_numba", "reference"):
        packed = torch.randn(30, 48, generator=torch.manual_seed(1), requires_grad=True)
        parts = (part.unflatten(1, (2, 8)) for part in packed.split(16, dim=1))
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        output = attnkit.attend(query[:, :, :5], key, value, mask=edges, backend=backend)
        results.append(torch.autograd.grad(output.square().sum(), packed)[0])
    torch.testing.assert_close(*results)


def test_tables_are_laid_out_for_the_caches_of_the_machine(monkeypatch):
    edges, copied = Edges(torch.randint(11, (2, 401)), 11), []
    kernels = edges_numba._compiled()
    copy = kernels.copy()
    monkeypatch.setattr(
        kernels, "copy", lambda: lambda *given: copied.append(given) or copy(*given)
    )
    tensors = [rand(11, HEADS, 8, seed=seed, dtype=torch.float32) for seed in (1, 2, 3)]
    outputs = {}
    for machine in (Caches(2**20, 2**21), Caches(2**4, 2**21), Caches(2**20, 2**8)):
        monkeypatch.setattr(edges_numba, "caches", lambda machine=machine: machine)
        copied.clear()
        heads_first = (tensor.transpose(0, 1)[None] for tensor in tensors)
        outputs[machine] = attend(*heads_first, mask=edges, backend="edges_numba")
        assert bool(copied) == (machine != Caches(2**20, 2**21))
    first, *others = outputs.values()
    assert all(torch.equal(first, other) for other in others)


def test_kernels_have_their_memory_whatever_the_default_dtype_is():
    """Half of it was missing, and the heap was written over."""
    query = torch.randn(1, 2, 64, 16)
    edges = attnkit.Edges(torch.randint(0, 64, (2, 800)), 64)
    expected = attnkit.attend(query, query, query, mask=edges, backend="edges_numba")
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = attnkit.attend(query, query, query, mask=edges, backend="edges_numba")
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
