"""A sink of each head: every kernel against the formula, written here once more in float64."""

import math

import pytest
import torch
from support import TOLERANCES, assert_equal, with_gradients

import attnkit
from attnkit import (
    Additive,
    Causal,
    Dense,
    EdgeFeatures,
    Edges,
    MultiHeadAttention,
    Packed,
    Padding,
    Window,
)
from attnkit.core.decode_step import attention_step
from attnkit.core.kernels.choose import BACKENDS, UnsupportedError

BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM, TOKENS = 2, 6, 3, 7, 5, 13
SINK = torch.tensor([-1.5, 0.0, 2.5, -math.inf, 60.0, 0.5], dtype=torch.float64)
SOME = torch.rand(BATCH, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) > 0.5
SOME[1, :, 3] = False  # a row that may look nowhere
MASKS = {
    "none": None,
    "causal": Causal(),
    "padding": Padding(torch.tensor([TOKENS, 0])),
    "window": Window(3, 2),
    "packed": Packed([5, 1, 7]) & Causal(),
    "dense": Dense(SOME),
    "edges": Edges(SOME[1, 0].nonzero().T.flip(0), TOKENS),
}


def make(dtype=torch.float64, kv_heads=KV_HEADS):
    shapes = (HEADS, DIM), (kv_heads, DIM), (kv_heads, VALUE_DIM)
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(BATCH, h, TOKENS, d, generator=generator).to(dtype) for h, d in shapes]
    return [*(t.requires_grad_() for t in tensors), SINK.to(dtype)]


def attend(query, key, value, sink, **options):
    return attnkit.attend(query, key, value, sink=sink, **options)


def formula(query, key, value, sink, mask=None, **_):
    """weight_ij = e^score_ij / (e^sink + Σ_j e^score_ij)."""
    groups = HEADS // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    exponentials = (query @ key.mT / math.sqrt(DIM)).exp()
    if mask is not None:
        exponentials = exponentials * mask.dense(*exponentials.shape[2:], torch.device("cpu"))
    total = exponentials.sum(-1, keepdim=True) + sink.exp()[:, None, None]
    return exponentials / total.clamp(min=1e-30) @ value


def trained(tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_every_kernel_is_the_formula(name, dtype):
    tensors, mask = trained(make(dtype)), MASKS[name]
    expected = with_gradients(trained(t.double() for t in tensors), formula, mask=mask)
    plain = with_gradients(tensors, attend, mask=mask, backend="math")
    served = set()
    for backend in BACKENDS:
        try:
            actual = with_gradients(tensors, attend, mask=mask, backend=backend.name)
        except UnsupportedError:
            continue
        for results in zip(actual, expected, plain, strict=True):
            assert_equal(*results)
        assert actual[4][3] == 0  # of −∞
        served.add(backend.name)
    assert {"flash", "block_sparse", "blockwise", "math", "reference"} <= served
    numba = {"edges_numba"} if dtype != torch.float64 else set()
    assert (served >= {"edges"} | numba) == (name == "edges")


def leaves_with_gradient(output, leaves):
    return [output, *torch.autograd.grad(output.square().sum(), leaves)]


@pytest.mark.parametrize(
    ("backend", "score"),
    [("edges", "scaled_dot"), ("edges", "leaky_relu"), ("edges_numba", "scaled_dot")],
)
@pytest.mark.parametrize("sizes", [1.0, 90.0], ids=["near", "far"])
def test_edges_with_all_they_carry(backend, score, sizes):
    """Far: scores whose exponentials are not within float32's range."""
    edges, generator = MASKS["edges"], torch.Generator().manual_seed(2)
    shapes = (edges.num_edges, 2), (HEADS, DIM, 2), (HEADS, VALUE_DIM, 2), (HEADS, edges.num_edges)
    carried = [torch.randn(shape, generator=generator) for shape in shapes]
    vector = torch.randn(HEADS, DIM, generator=generator)

    def run(dtype, backend):
        query, *others = [t.detach().to(dtype) for t in (*make(kv_heads=HEADS), *carried, vector)]
        leaves = trained([query * sizes, *others])
        query, key, value, sink, *carries, v = leaves
        if score == "scaled_dot":
            given, leaves = score, leaves[:-1]
        else:
            given = Additive(v, score)
        options = {"mask": edges, "score": given, "edge_features": EdgeFeatures(*carries)}
        output = attend(query, key, value, sink, **options, backend=backend)
        return leaves_with_gradient(output, leaves)

    exact = torch.float64 if backend == "edges" else torch.float32
    tolerance = {} if backend == "edges" else {"atol": 2e-4 * sizes, "rtol": 1e-3}
    for ours, theirs in zip(run(exact, backend), run(torch.float64, "reference"), strict=True):
        torch.testing.assert_close(ours.double(), theirs, **tolerance)


@pytest.mark.parametrize("backend", ["reference", "math", "flash", "block_sparse", "edges"])
def test_gradcheck_and_the_second_derivative(backend):
    query, key, value = (t[:1, :, :5] for t in make(kv_heads=2)[:3])
    sink = torch.tensor([0.3, -0.7, 1.1, 0.0, -2.0, 1.5], dtype=torch.float64)
    mask = Edges(torch.tensor([[0, 1, 1, 2, 4], [0, 0, 1, 3, 3]]), 5)
    if backend != "edges":
        mask = Dense(mask.dense(5, 5, torch.device("cpu")))
    tensors = trained([query, key, value, sink])

    def run(*tensors):
        return attend(*tensors, mask=mask, backend=backend)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)
    if backend in ("reference", "math"):
        assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)
    else:
        with pytest.raises(RuntimeError, match="has no second derivative"):
            torch.autograd.grad(run(*tensors).square().sum(), tensors[3], create_graph=True)


@pytest.mark.parametrize("name", MASKS)
def test_weights_times_values_are_the_output(name):
    query, key, value, sink = trained(make())
    weights = attnkit.attention_weights(query, key, mask=MASKS[name], sink=sink)
    output = weights @ value.repeat_interleave(HEADS // KV_HEADS, 1)
    torch.testing.assert_close(output, attend(query, key, value, sink, mask=MASKS[name]))
    assert (weights.sum(-1)[:, [0, 2]] < 1).all()
    some = attnkit.attention_weights(query, key, mask=MASKS[name], sink=sink, heads=[4, 1])
    torch.testing.assert_close(some, weights[:, [4, 1]])
    if name == "edges":
        source, target = MASKS[name].edge_index
        of_edges = attnkit.edge_weights(query, key, MASKS[name], sink=sink)
        torch.testing.assert_close(
            *(
                leaves_with_gradient(found, [query, key, sink])
                for found in (of_edges, weights[:, :, target, source])
            )
        )


@pytest.mark.parametrize("backend", ["blockwise", "math"])
def test_dropout(backend):
    query, key, value, sink = make(kv_heads=HEADS)
    weights = attnkit.attention_weights(query, key, sink=sink)
    outputs = []
    for seed in range(100):
        torch.manual_seed(seed)
        outputs.append(attend(query, key, value, sink, dropout_p=0.3, backend=backend).detach())
    expected = weights @ value
    mean, spread = torch.stack(outputs).mean(0), torch.stack(outputs).std(0) / 10
    assert ((mean - expected).abs() < 5 * spread + 1e-9).all()
    assert not torch.allclose(outputs[0], expected)


class Attention(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, *tensors):
        return attend(*tensors, mask=self.mask)


def test_compiled():
    torch._dynamo.reset()
    compiled = torch.compile(Attention(Causal()), fullgraph=True, backend="aot_eager")
    tensors = trained(make(torch.float32))
    expected = with_gradients(tensors, attend, mask=Causal(), backend="reference")
    torch.testing.assert_close(with_gradients(tensors, compiled), expected, atol=1e-4, rtol=1e-4)


def test_exported():
    tensors = trained(make(torch.float32))
    program = torch.export.export(Attention(Causal()), tuple(tensors)).module()
    expected = attend(*tensors, mask=Causal(), backend="reference")
    torch.testing.assert_close(program(*tensors), expected)


def test_under_torch_func_and_autocast():
    query, key, value, sink = (t.detach() for t in make())
    one = torch.func.grad(lambda s: attend(query, key, value, s).square().sum())(sink)
    leaf = sink.clone().requires_grad_()
    attend(query, key, value, leaf).square().sum().backward()
    torch.testing.assert_close(one, leaf.grad)
    halves = [t.float() for t in (query, key, value, sink)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attend(*halves)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), attend(query, key, value, sink), atol=3e-2, rtol=0)


def test_a_block_learns_its_sinks():
    torch.manual_seed(0)
    block, plain = MultiHeadAttention(12, 3, sink=True), MultiHeadAttention(12, 3)
    assert set(block.state_dict()) - set(plain.state_dict()) == {"sink"}
    plain.load_state_dict({n: t for n, t in block.state_dict().items() if n != "sink"})
    assert (block.sink == 0).all()
    x = torch.randn(2, 5, 12)
    assert not torch.allclose(block(x), plain(x))
    block(x).square().sum().backward()
    assert block.sink.grad.abs().min() > 0
    with torch.no_grad():
        block.sink.copy_(torch.tensor([0.5, -1.0, 2.0]))
    weights = block.attention_weights(x)
    with attnkit.capture_attention(block) as captured:
        whole = block(x, mask=Causal())
    torch.testing.assert_close(captured[""][0], block.attention_weights(x, mask=Causal()))
    assert (weights.sum(-1) < 1).all()
    cache = block.new_cache(2, 5)
    with torch.no_grad():
        steps = [attention_step(block, t, cache) for t in x.split(1, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


QUERY = torch.zeros(2, 6, 3, 4)


@pytest.mark.parametrize(
    ("sink", "options", "error", "message"),
    [
        (torch.zeros(3), {}, ValueError, r"sink: expected \[heads\] = \[6\], got \[3\]"),
        (torch.zeros(6, dtype=int), {}, TypeError, "sink: expected a floating-point tensor"),
        (0.0, {}, TypeError, "sink: expected a floating-point tensor, got float"),
        (torch.zeros(6), {"normalizer": "linear"}, ValueError, "sink: expected softmax, .*Linear"),
        (torch.zeros(6), {"normalizer": "hard"}, ValueError, "sink: expected softmax, .*Hard"),
        (torch.zeros(6), {"backend": "cudnn"}, UnsupportedError, "has no sink"),
    ],
)
def test_what_is_no_sink(sink, options, error, message):
    with pytest.raises(error, match=message):
        attend(QUERY, QUERY, QUERY, sink, **options)
