"""The Triton kernels against the definition: by Triton's interpreter on CPU tensors, which a
process of its own does (Triton decides it when a kernel is defined), and where there is one on a
GPU; and that they compile for one."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnkit
from attnkit import Additive, Cosine, EdgeFeatures, Edges, Gaussian, General, attend
from attnkit.core.inputs import check_inputs
from attnkit.core.kernels.choose import UnsupportedError
from attnkit.core.kernels.edges import triton as edges_triton
from attnkit.core.kernels.edges.triton import TritonEdgesKernel

BATCH, HEADS, DIM, VALUE_DIM, SOURCES, TARGETS = 2, 2, 3, 5, 7, 5

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ["cpu"] if IS_INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
on_device = pytest.mark.parametrize("device", DEVICES)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(IS_INTERPRETED, reason="starts the interpreter")
def test_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20


def random_graph(num_edges=17, seed=0):
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(SOURCES, (num_edges,), generator=generator)
    target = torch.randint(TARGETS - 1, (num_edges,), generator=generator)
    return torch.stack([source, target])  # the last target has no edges


def graphs():
    some = random_graph()
    # sources in turn, so that no tile has them all and the largest score comes late
    hub = torch.stack([torch.arange(23) // 4 % SOURCES, torch.full((23,), 2)])
    complete = torch.cartesian_prod(torch.arange(SOURCES), torch.arange(TARGETS)).T
    return {
        "some": some,
        "sorted": some[:, some[1].argsort(stable=True)],
        "repeated": torch.cat([some, some[:, :7]], dim=1),
        "hub": torch.cat([hub, some], dim=1),
        "source hub": torch.stack([torch.full((19,), 3), torch.arange(19) % TARGETS]),
        "complete": complete,
        "one edge": some[:, :1],
        "no edges": some[:, :0],
    }


def edges_of(name, device):
    return Edges(graphs()[name].to(device), TARGETS, SOURCES)


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tensors(kv_heads=HEADS, dim=DIM):
    return [
        rand(BATCH, HEADS, TARGETS, dim, seed=1),
        rand(BATCH, kv_heads, SOURCES, dim, seed=2),
        rand(BATCH, kv_heads, SOURCES, VALUE_DIM, seed=3),
    ]


def scores(dim=DIM):
    return {
        "scaled_dot": (lambda: "scaled_dot", []),
        "general": (General, [rand(HEADS, dim, dim, seed=4)]),
        "cosine": (Cosine, [rand(HEADS).abs() + 0.5]),
        "gaussian": (Gaussian, [rand(HEADS).abs() + 1]),
        "tanh": (Additive, [rand(HEADS, dim, seed=5)]),
        "gatv2": (lambda vector: Additive(vector, "leaky_relu", 0.3), [rand(HEADS, dim, seed=5)]),
        "relu": (lambda vector: Additive(vector, "leaky_relu", 0.0), [rand(dim, seed=5)]),
    }


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of two tiles, so that nodes have several of both."""
    monkeypatch.setattr(edges_triton, "CHUNK", 12)
    monkeypatch.setattr(edges_triton, "TILE", 64)


def leaves(inputs, dtype, device):
    return [tensor.to(device, dtype).requires_grad_() for tensor in inputs]


def results(output, inputs):
    towards = (torch.arange(output.numel(), device=output.device) % 17 - 8).view_as(output) / 8
    return [output, *torch.autograd.grad(output, inputs, towards.to(output.dtype))]


class Operators(TorchDispatchMode):
    """The operators that ran, and the largest tensor that any of them gave."""

    def __init__(self):
        super().__init__()
        self.names = set()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.add(func.name().partition(".")[0])
        for tensor in torch.utils._pytree.tree_leaves(result):
            # bytes are what the interpreter copies, of all that a kernel is given
            if isinstance(tensor, torch.Tensor) and tensor.dtype != torch.uint8:
                self.largest = max(self.largest, tensor.numel())
        return result


def check(inputs, score, device, mask, dtype=torch.float32, layout=lambda tensor: tensor):
    """Output and gradients of the kernels against the definition in float64; gives the former."""
    narrow = leaves(inputs, dtype, device)
    wide = leaves(narrow, torch.float64, device)
    expected = attend(*wide[:3], mask=mask, score=score(*wide[3:]), backend="reference")
    given = [*map(layout, narrow[:3]), *narrow[3:]]
    checked = check_inputs(*given[:3], score=score(*given[3:]), mask=mask)
    assert TritonEdgesKernel().serves(checked)
    actual = attend(*given[:3], mask=mask, score=score(*given[3:]), backend="edges_triton")
    assert actual.dtype == dtype
    actual = results(actual, narrow)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for ours, theirs in zip(actual, results(expected, wide), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)
    return actual


@on_device
@pytest.mark.parametrize("name", ["scaled_dot", "general", "cosine", "gaussian", "tanh", "relu"])
def test_every_score(name, device, small_chunks):
    """Also with channels that are apart."""
    score, parameters = scores()[name]
    layout = (lambda t: t.mT.contiguous().mT) if name == "scaled_dot" else (lambda t: t)
    check([*tensors(), *parameters], score, device, edges_of("hub", device), layout=layout)


@on_device
def test_a_sink(device, small_chunks):
    given = leaves([*tensors(), torch.linspace(-2, 3, HEADS)], torch.float32, device)
    mask = edges_of("hub", device)

    def run(inputs, backend):
        return results(attend(*inputs[:3], mask=mask, sink=inputs[3], backend=backend), inputs)

    expected = run(leaves(given, torch.float64, device), "reference")
    for ours, theirs in zip(run(given, "edges_triton"), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)


@on_device
@pytest.mark.parametrize("graph", ["repeated", "source hub", "complete", "one edge", "no edges"])
def test_every_graph(graph, device, small_chunks):
    score, parameters = scores()["gatv2"]
    mask = edges_of(graph, device)
    output, of_query, *_ = check([*tensors(), *parameters], score, device, mask)
    alone = ~torch.isin(torch.arange(TARGETS, device=device), mask.edge_index[1])
    assert (output[:, :, alone] == 0).all()
    assert (of_query[:, :, alone] == 0).all()


@on_device
def test_a_hub_of_more_chunks_than_a_tile_has(device, small_chunks, monkeypatch):
    monkeypatch.setattr(edges_triton, "CHUNK", 1)
    score, (vector,) = scores()["gatv2"]
    of_one_head = [*(tensor[:1, :1] for tensor in tensors()), vector[:1]]
    check(of_one_head, score, device, edges_of("hub", device))


@on_device
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("scaled_dot", torch.bfloat16),
        ("scaled_dot", torch.float16),
        ("gaussian", torch.float16),
        ("gatv2", torch.bfloat16),
    ],
)
def test_lower_precision(name, dtype, device, small_chunks):
    score, parameters = scores()[name]
    check([*tensors(), *parameters], score, device, edges_of("hub", device), dtype)


@on_device
def test_one_channel_as_in_gat(device):
    score, parameters = scores(dim=1)["gatv2"]
    check([*tensors(dim=1), *parameters], score, device, edges_of("hub", device))


@on_device
def test_shared_heads_and_strides_are_read_in_place(device, small_chunks):
    def nodes_first(tensor):
        """As a projection of queries and keys at once gives it."""
        both = torch.cat([tensor, tensor], dim=1).transpose(1, 2).contiguous().transpose(1, 2)
        return both.chunk(2, dim=1)[1]

    score, parameters = scores()["tanh"]
    inputs, mask = [*tensors(kv_heads=1), *parameters], edges_of("hub", device)
    check(inputs, score, device, mask, layout=nodes_first)
    given = [nodes_first(tensor) for tensor in leaves(inputs[:3], torch.float32, device)]
    assert not given[0].is_contiguous()
    with torch.no_grad(), Operators() as ran:
        attend(*given, mask=mask, backend="edges_triton")
    assert "aten::new_empty" in ran.names
    assert not ran.names & {"aten::clone", "aten::_to_copy", "aten::repeat"}


@on_device
def test_scores_that_differ_by_much(device, small_chunks):
    query, key, value = tensors()
    query = query * torch.logspace(-3, 3, TARGETS, dtype=torch.float64)[:, None]
    inputs = leaves([query, key, value], torch.float32, device)
    output = attend(*inputs, mask=edges_of("hub", device), backend="edges_triton")
    expected = attend(*inputs, mask=edges_of("hub", device), backend="reference")
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    assert all(gradient.isfinite().all() for gradient in results(output, inputs))


@on_device
@pytest.mark.parametrize("name", ["scaled_dot", "gatv2"])
def test_all_kernels_drop_the_same_edges(name, device, small_chunks):
    score, parameters = scores()[name]
    inputs = leaves([*tensors(), *parameters], torch.float32, device)
    query, key, value, *parameters = inputs
    mask = Edges(graphs()["complete"].to(device), TARGETS, SOURCES)

    def ours(value, seed=3):
        torch.manual_seed(seed)
        options = {"mask": mask, "score": score(*parameters), "backend": "edges_triton"}
        return attend(query, key, value, **options, dropout_p=0.25)

    # the weights that are kept are what the values that tell the sources apart come to
    kept = ours(torch.eye(SOURCES, device=device).expand(BATCH, HEADS, -1, -1))
    weights = attnkit.attention_weights(query, key, score=score(*parameters))
    keep = (kept > 0).float() / 0.75
    torch.testing.assert_close(kept, weights * keep)
    assert 0.6 < (kept > 0).float().mean() < 0.9
    assert not torch.equal(keep[0, 0], keep[0, 1])  # heads
    assert not torch.equal(keep[0, 0], keep[1, 0])  # items
    actual = results(ours(value), inputs)
    expected = results((weights * keep.detach()) @ value, inputs)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert not torch.equal(ours(value, seed=4), actual[0])


@on_device
def test_the_same_to_the_bit(device, small_chunks):
    score, parameters = scores()["gatv2"]
    inputs = leaves([*tensors(), *parameters], torch.float32, device)
    mask = edges_of("some", device)
    first, second = (
        results(
            attend(*inputs[:3], mask=mask, score=score(*inputs[3:]), backend="edges_triton"), inputs
        )
        for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


@on_device
def test_nothing_of_edges_times_heads_is_made_nor_waited_for(device):
    score, parameters = scores()["scaled_dot"]
    inputs = leaves([*tensors(), *parameters], torch.float32, device)
    mask = Edges(random_graph(num_edges=701).to(device), TARGETS, SOURCES)
    options = {"mask": mask, "score": score(*inputs[3:]), "dropout_p": 0.1}
    for step in ("first", "second"):
        with Operators() as ran:
            attend(*inputs[:3], **options, backend="edges_triton").square().sum().backward()
        assert 0 < ran.largest <= mask.edge_index.numel()
        # the numbers of chunks are read once
        assert ("aten::_local_scalar_dense" in ran.names) == (step == "first")
        assert step == "first" or "aten::nonzero" not in ran.names


@on_device
def test_what_is_left_to_torch(device, monkeypatch):
    def refuse(kernel, problem):
        raise AssertionError("taken by Triton")

    mask = edges_of("some", device)
    query, key, value = (tensor.to(device) for tensor in tensors())
    narrow = [query.float(), key.float(), value.float()]
    with attnkit.record_backends() as record:
        attend(*narrow, mask=mask, backend="edges_triton")
    assert record.total() == {"edges_triton": 1}
    monkeypatch.setattr(edges_triton, "solve", refuse)
    with pytest.raises(AssertionError, match="taken by Triton"):
        attend(*narrow, mask=mask, backend="edges_triton")
    features = EdgeFeatures(
        torch.randn(17, 2, device=device), torch.randn(HEADS, DIM, 2).to(device)
    )
    wide = torch.randn(BATCH, HEADS, SOURCES, 257, device=device)
    for options in (
        {"query": query, "key": key, "value": value},
        {"query": narrow[0], "key": narrow[1], "value": narrow[2], "edge_features": features},
        {"query": narrow[0], "key": narrow[1], "value": wide},
        {"query": wide[:, :, :TARGETS], "key": wide, "value": narrow[2]},
    ):
        expected = attend(**options, mask=mask, backend="reference")
        with pytest.raises(UnsupportedError):
            attend(**options, mask=mask, backend="edges_triton")
        torch.testing.assert_close(attend(**options, mask=mask, backend="edges"), expected)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter serves the CPU")
def test_without_triton_or_on_the_cpu(monkeypatch):
    """That nothing imports it before a kernel is asked for is in test_layering."""
    narrow, mask = [tensor.float() for tensor in tensors()], edges_of("some", "cpu")
    assert not TritonEdgesKernel().serves(check_inputs(*narrow, mask=mask))
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not TritonEdgesKernel().serves(check_inputs(*narrow, mask=mask))
    attend(*narrow, mask=mask, backend="edges")


class Compiler:
    """As much of Triton's driver as compiling needs, so that it needs no GPU."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 1000 + self.capability  # no device has this number, under which kernels are kept

    def get_current_stream(self, device):
        return 0


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("name", "dtype", "dropout_p"),
    [
        ("scaled_dot", torch.bfloat16, 0.1),
        ("gatv2", torch.float32, 0.0),
        ("tanh", torch.float16, 0.1),
    ],
)
def test_the_kernels_compile(
    name, dtype, dropout_p, capability, small_chunks, monkeypatch, tmp_path
):
    """What the interpreter does not see: types, layouts, and the assembler's limits."""
    from triton.runtime import driver

    compiled = {}

    def compile_only(kernel, num_programs, *arguments, **constants):
        options = {**constants, "grid": (num_programs,), "num_warps": 1}
        compiled[kernel.fn.__name__] = kernel.run(*arguments, warmup=True, **options).asm["cubin"]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Compiler(capability))
    monkeypatch.setattr(edges_triton, "_launch", compile_only)
    monkeypatch.setattr(edges_triton, "_runs_on", lambda device: True)
    score, parameters = scores()[name]
    inputs = leaves([*tensors(), *parameters], dtype, "cpu")
    mask = edges_of("hub", "cpu")
    options = {"mask": mask, "score": score(*inputs[3:]), "dropout_p": dropout_p}
    attend(*inputs[:3], **options, backend="edges_triton").sum().backward()
    assert sorted(compiled) == [
        "forward_kernel",
        "merge_kernel",
        "source_gradients_kernel",
        "sum_kernel",
        "target_gradients_kernel",
    ]
    assert all(len(binary) > 0 for binary in compiled.values())
