"""What only the kernels for edges have that numba compiles: hashes for dropout, memory, and limits.
That they are the definition is in test_edges."""

import os
import subprocess
import sys

import pytest
import torch
from edge_graphs import HEADS, given, graphs, rand, random_graph, results

import attnkit
from attnkit import Additive, Edges, attend
from attnkit.core.inputs import check_inputs
from attnkit.core.kernels.edges import numba as edges_numba
from attnkit.core.operators.cpu import Caches


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
    torch.testing.assert_close(found[True][0], found[False][0], atol=1e-6, rtol=1e-6)
    if edges_numba.FEW == 0:  # apart
        one = {"key"} if score != "gat" else {"key", "value"}
        assert found[True][1] == one
        assert found[False][1] == (one if score == "gat" else {"key_value"})


def test_what_is_not_finite_stays_so():
    inputs, _ = given("scaled_dot", dtype=torch.float32)
    for broken in (torch.nan, torch.inf):
        query = inputs[0].detach().clone()
        query[0, 0, 2] = broken
        output = attend(query, *inputs[1:], mask=graphs()["complete"], backend="edges_numba")
        assert output[0, 0, 2].isnan().all()
        assert output[0, 0, 3:].isfinite().all()


def test_dropout_keeps_a_share_and_no_two_lanes_alike():
    count, p = 20_011, 0.3
    edges = Edges(torch.arange(count).expand(2, -1), count)
    query = torch.zeros(2, 3, count, 8)
    output = attend(query, query, query + 1, mask=edges, dropout_p=p, backend="edges_numba")
    is_kept = output[..., 0].flatten(0, 1) != 0
    torch.testing.assert_close(output[..., 0].unique(), torch.tensor([0, 1 / (1 - p)]))
    deviation = (p * (1 - p) / count) ** 0.5
    assert ((is_kept.double().mean(dim=1) - (1 - p)).abs() < 4 * deviation).all()
    both = (is_kept[:, None] & is_kept[None]).double().mean(dim=2)
    neighbours = (is_kept[:, 1:] & is_kept[:, :-1]).double().mean(dim=1)
    for shares in (both[~torch.eye(6, dtype=torch.bool)], neighbours):
        assert ((shares - (1 - p) ** 2).abs() < 5 * deviation).all()


def test_the_same_to_the_bit_every_time(computed_in):
    inputs, make_score = given("gatv2", dtype=torch.float32)
    mask = Edges(random_graph(13, 11, 4001), 11, 13)
    options = {"mask": mask, "score": make_score(inputs), "backend": "edges_numba"}
    first, *others = (results(attend(*inputs[:3], **options), inputs) for _ in range(3))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_gradients_that_nobody_wants_are_not_there():
    query, key, value = (tensor.detach() for tensor in given("scaled_dot", dtype=torch.float32)[0])
    mask = graphs()["some"]
    for wanted in (query, value):
        wanted.requires_grad_()
        found, expected = (
            torch.autograd.grad(attend(query, key, value, mask=mask, backend=kernel).sum(), wanted)
            for kernel in ("edges_numba", "reference")
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        wanted.requires_grad_(False)


def test_fewer_queries_than_keys_of_one_projection():
    """Their gradients have no common rows, though they begin side by side."""
    edges = Edges(torch.randint(5, (2, 90), generator=torch.manual_seed(0)), (30, 5))
    gradients = []
    for backend in ("edges_numba", "reference"):
        packed = torch.randn(30, 48, generator=torch.manual_seed(1), requires_grad=True)
        parts = (part.unflatten(1, (2, 8)) for part in packed.split(16, dim=1))
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        output = attend(query[:, :, :5], key, value, mask=edges, backend=backend)
        gradients.append(torch.autograd.grad(output.square().sum(), packed)[0])
    torch.testing.assert_close(*gradients)


def test_tables_are_laid_out_for_the_caches_of_the_machine(monkeypatch):
    edges, copied = Edges(torch.randint(11, (2, 401)), 11), []
    kernels = edges_numba._compiled()
    copy = kernels.copy()
    monkeypatch.setattr(
        kernels, "copy", lambda: lambda *given: copied.append(given) or copy(*given)
    )
    tensors = [rand(11, HEADS, 8, seed=seed, dtype=torch.float32) for seed in (1, 2, 3)]
    outputs = []
    for machine in (Caches(2**20, 2**21), Caches(2**4, 2**21), Caches(2**20, 2**8)):
        monkeypatch.setattr(edges_numba, "caches", lambda machine=machine: machine)
        copied.clear()
        heads_first = (tensor.transpose(0, 1)[None] for tensor in tensors)
        outputs.append(attend(*heads_first, mask=edges, backend="edges_numba"))
        assert bool(copied) == (machine != Caches(2**20, 2**21))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_kernels_have_their_memory_whatever_the_default_dtype_is():
    """Half of it was missing, and the heap was written over."""
    query, edges = torch.randn(1, 2, 64, 16), Edges(torch.randint(0, 64, (2, 800)), 64)
    expected = attend(query, query, query, mask=edges, backend="edges_numba")
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = attend(query, query, query, mask=edges, backend="edges_numba")
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("made", "options", "reason"),
    [
        ({"dtype": torch.float64}, {}, "needs float32, bfloat16 or float16, got torch.float64"),
        ({}, {"score": Additive(torch.ones(8))}, "needs the activation 'leaky_relu', got 'tanh'"),
        ({"device": "meta"}, {}, "needs tensors on cpu, got meta"),
        ({"size": (1, 2, 4, 257)}, {}, "needs a head_dim of at most 256, got 257"),
    ],
)
def test_what_it_refuses(made, options, reason):
    tensor = torch.zeros(**{"size": (1, 2, 4, 8)} | made)
    mask = Edges(torch.tensor([[0, 1], [1, 2]]), 4).to(tensor.device)
    inputs = check_inputs(tensor, tensor, tensor, mask=mask, **options)
    assert reason in [*edges_numba.NumbaEdgesKernel().unsupported_reasons(inputs)]


def test_what_is_left_to_torch(monkeypatch):
    """What torch traces, which would take what kernels write for a constant; wide dot products,
    which it computes faster; and all without numba."""
    mask, reasons = Edges(torch.randint(500, (2, 600)), 500), []

    def explained(query):
        return attnkit.explain_backends(query, query, query, mask=mask)

    def traced(query):
        reasons.extend(explained(query).reasons["edges_numba"])
        return query + 1

    torch.jit.trace(traced, torch.randn(1, 2, 500, 8), check_trace=False)
    assert reasons == ["cannot be traced by torch"]
    for dim, expected in ((32, "edges_numba"), (33, "edges")):
        assert explained(torch.randn(1, 2, 500, dim)).chosen == expected
    monkeypatch.setattr(edges_numba, "_is_there", lambda: False)
    explanation = explained(torch.randn(1, 2, 500, 8))
    assert explanation.reasons["edges_numba"] == ["needs numba"]
    assert explanation.chosen == "edges"


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
