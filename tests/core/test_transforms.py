"""attend and the block under torch.compile, torch.export, autocast and in low precision."""

import pytest
import torch

import attnkit
from attnkit import Causal, MultiHeadAttention, Padding, attend
from attnkit.core.kernels import recompute

CASES = {
    "plain": {},
    "causal": {"mask": Causal()},
    "and": {"mask": Causal() & Padding(torch.tensor([7, 0, 3]))},
    "dense": {"mask": torch.arange(49).view(7, 7) % 3 > 0},
    "bias": {"bias": torch.linspace(-1, 1, 49).view(7, 7)},
}


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "flash", "blockwise", "math", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_compiled_and_exported_equal_eager(backend, case):
    block = MultiHeadAttention(22, 2, backend=backend)
    x = torch.randn(3, 7, 22, requires_grad=True)
    options = CASES[case]
    eager = block(x, **options)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(x, **options)
    torch.testing.assert_close(compiled, eager)
    wanted = [x, *block.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(compiled.square().sum(), wanted),
        torch.autograd.grad(eager.square().sum(), wanted),
    )
    exported = torch.export.export(block, (x,), options).module()
    torch.testing.assert_close(exported(x, **options), eager)
    torch.testing.assert_close(exported(2 * x, **options), block(2 * x, **options))


@pytest.mark.slow
def test_inductor_equals_eager():
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 2, 7, 8, requires_grad=True) for _ in range(3))
    lengths = torch.tensor([7, 0, 3])

    def function(query, key, value, lengths):
        # masks made inside of the compiled region, and none made
        masked = attend(query, key, value, mask=Causal() & Padding(lengths))
        return masked + attend(query, key[:, :1], value[:, :1], backend="math")

    eager = function(query, key, value, lengths)
    compiled = torch.compile(function, fullgraph=True)(query, key, value, lengths)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.square().sum(), [query, key, value]),
        torch.autograd.grad(eager.square().sum(), [query, key, value]),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["auto", "flash", "blockwise", "math", "reference"])
def test_autocast_and_low_precision(dtype, backend):
    torch.manual_seed(0)
    block = MultiHeadAttention(22, 2, backend=backend)
    x = torch.randn(3, 7, 22)
    expected = block(x, mask=Causal())
    tolerance = {"atol": 2e-2, "rtol": 2e-2}
    with torch.autocast("cpu", dtype):
        cast = block(x, mask=Causal())
        kernel_input = torch.randn(3, 2, 7, 11)
        assert attend(kernel_input, kernel_input, kernel_input, backend=backend).dtype == dtype
        weights = block.attention_weights(x, mask=Causal())
    assert cast.dtype == dtype
    torch.testing.assert_close(cast.float(), expected, **tolerance)
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(3, 2, 7), **tolerance)
    converted = MultiHeadAttention(22, 2, backend=backend).to(dtype)
    converted.load_state_dict(block.state_dict())
    torch.testing.assert_close(converted(x.to(dtype), mask=Causal()).float(), expected, **tolerance)


def test_autocast_leaves_float64_alone():
    x = torch.randn(3, 2, 7, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert attnkit.attend(x, x, x).dtype == torch.float64


SCORES = {
    "general": lambda: attnkit.General(torch.randn(6, 8, 8, requires_grad=True)),
    "cosine": lambda: attnkit.Cosine(torch.rand(6, requires_grad=True)),
    "gaussian": lambda: attnkit.Gaussian(torch.rand(6, requires_grad=True)),
    "softcap": lambda: attnkit.Gaussian(torch.rand(6, requires_grad=True), softcap=2.0),
    "additive": lambda: attnkit.Additive(torch.randn(6, 8, requires_grad=True)),
    "leaky_relu": lambda: attnkit.Additive(torch.randn(8, requires_grad=True), "leaky_relu"),
}


class Attention(torch.nn.Module):
    def forward(self, query, key, value, score):
        return attend(query, key, value, score=score, mask=Causal("bottom_right"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
def test_scores_compiled_and_exported_equal_eager(name, monkeypatch):
    monkeypatch.setattr(recompute, "BLOCK_SCORES", {"cpu": 6 * 11 * 3})
    score = SCORES[name]()
    query, key, value = (
        torch.randn(2, heads, tokens, 8, requires_grad=True)
        for heads, tokens in ((6, 5), (2, 11), (2, 11))
    )
    inputs = query, key, value, score
    wanted = [query, key, value, *(t for t in vars(score).values() if isinstance(t, torch.Tensor))]
    eager = Attention()(*inputs)
    compiled = torch.compile(Attention(), fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.square().sum(), wanted),
        torch.autograd.grad(eager.square().sum(), wanted),
    )
    exported = torch.export.export(Attention(), inputs).module()
    torch.testing.assert_close(exported(*inputs), eager)


@pytest.mark.parametrize("name", SCORES)
def test_scores_under_autocast(name):
    query, key, value = (torch.randn(3, 6, 7, 8, requires_grad=True) for _ in range(3))
    score = SCORES[name]()
    expected = attend(query, key, value, score=score)
    with torch.autocast("cpu", torch.bfloat16):
        output = attend(query, key, value, score=score)
        gradients = torch.autograd.grad(output.square().sum(), (query, key, value))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, atol=5e-2, rtol=5e-2)
    exact = torch.autograd.grad(expected.square().sum(), (query, key, value))
    for gradient, right in zip(gradients, exact, strict=True):
        assert (gradient - right).norm() < 0.1 * right.norm()


@pytest.mark.slow
def test_dropout_in_compiled_blocks_is_that_of_the_backward(monkeypatch):
    monkeypatch.setattr(recompute, "BLOCK_SCORES", {"cpu": 6 * 11 * 3})
    query, key, value = (torch.randn(2, 6, tokens, 8) for tokens in (5, 11, 11))
    value.requires_grad_()

    def function(query, key, value):
        return attend(query, key, value, dropout_p=0.5, backend="blockwise")

    output = torch.compile(function, fullgraph=True, backend="aot_eager")(query, key, value)
    (gradient,) = torch.autograd.grad(output, value, torch.ones_like(output))
    assert not torch.allclose(output, function(query, key, value))
    torch.testing.assert_close((gradient * value).sum(), output.sum(), atol=1e-3, rtol=1e-4)
