"""attend and the block under torch.compile, torch.export, autocast and in low precision."""

import pytest
import torch

import attnkit
from attnkit import Causal, MultiHeadAttention, Padding, attend

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


@pytest.mark.parametrize("backend", ["auto", "flash", "math", "reference"])
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


def test_compiled_code_takes_other_batch_and_token_sizes():
    block = MultiHeadAttention(22, 2)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for batch, tokens in ((2, 5), (3, 7), (5, 11)):
        x = torch.randn(batch, tokens, 22)
        torch.testing.assert_close(compiled(x, mask=Causal()), block(x, mask=Causal()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["auto", "flash", "math", "reference"])
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
