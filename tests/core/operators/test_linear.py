"""The linear layer of our blocks: oneDNN's products against torch's own."""

import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import attnkit
from attnkit.core.operators import linear as file
from attnkit.core.operators.linear import is_linear, linear, run_linear
from attnkit.layers.tokens.block import TransformerBlock


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    """oneDNN's operator at every size, and on every processor that has it."""
    monkeypatch.setattr(file, "_is_amd", lambda: True)
    monkeypatch.setattr(file, "ONEDNN", file._found())
    monkeypatch.setattr(file, "LARGE", 1)
    monkeypatch.setattr(file, "LARGE_WITH_GRADIENT", 0)


def given(shape, bias, out=31):
    tokens = torch.randn(*shape, requires_grad=True)
    weight = torch.randn(out, shape[-1], requires_grad=True)
    return [tokens, weight, *([torch.randn(out, requires_grad=True)] if bias else [])]


def in_double(tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def call(function, tensors):
    return function(tensors[0], tensors[1], tensors[2] if len(tensors) == 3 else None)


SHAPES = [(32, 64), (5, 7, 64), (2, 3, 4, 16), (0, 64), (64,), (1, 64), (97, 16), (3, 37, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_torch_in_float64(shape, bias):
    tensors = given(shape, bias)
    double = in_double(tensors)
    ours, theirs = call(linear, tensors), call(F.linear, double)
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(call(linear, tensors), ours)
    sums = [torch.autograd.grad(y.sin().sum(), x) for y, x in ((ours, tensors), (theirs, double))]
    for mine, other in zip(*sums, strict=True):
        torch.testing.assert_close(mine, other.float(), rtol=1e-4, atol=1e-4)


def test_second_derivatives_are_those_of_torch():
    tensors = given((6, 16), bias=True)
    double = in_double(tensors)
    second = []
    for function, inputs in ((linear, tensors), (F.linear, double)):
        first = torch.autograd.grad(call(function, inputs).sin().sum(), inputs, create_graph=True)
        second.append(torch.autograd.grad(sum(x.square().sum() for x in first), inputs))
    for mine, other in zip(*second, strict=True):
        torch.testing.assert_close(mine, other.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_forward_derivatives_are_those_of_torch(which):
    tensors = given((2, 6, 16), bias=True)
    tangent = torch.randn_like(tensors[which])
    found = []
    for function in (linear, F.linear):
        with forward_ad.dual_level():
            inputs = list(tensors)
            inputs[which] = forward_ad.make_dual(tensors[which], tangent)
            found.append(forward_ad.unpack_dual(call(function, inputs)).tangent)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_only_the_gradients_that_are_asked_for_are_computed():
    tokens, weight, bias = given((4, 16), bias=True)
    for wanted in (tokens, weight, bias):
        for tensor in (tokens, weight, bias):
            tensor.requires_grad_(tensor is wanted)
        output = linear(tokens, weight, bias)
        (gradient,) = torch.autograd.grad(output.sum(), wanted)
        assert gradient.shape == wanted.shape
    assert not linear(tokens, weight, bias.requires_grad_(False)).requires_grad


@pytest.mark.parametrize("trained", [["tokens"], ["weight"], ["bias"], ["tokens", "bias"]])
def test_a_frozen_weight_keeps_no_tokens_for_the_backward(trained):
    tensors = dict(zip(("tokens", "weight", "bias"), given((4, 16), bias=True), strict=True))
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in trained)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        output = linear(*tensors.values())
    needed = {"tokens": "weight", "weight": "tokens", "bias": "none"}
    assert {t.data_ptr() for t in kept if t is not None} == {
        tensors[needed[name]].data_ptr() for name in trained if needed[name] in tensors
    }
    held = weakref.ref(tokens := tensors.pop("tokens") * 1)
    output = linear(tokens, *tensors.values())
    del tokens
    assert (held() is None) == ("weight" not in trained)
    assert output.requires_grad  # and is alive, with what it keeps


def test_some_rows_of_a_layer():
    layer, tokens = nn.Linear(16, 12), torch.randn(5, 16)
    torch.testing.assert_close(run_linear(layer, tokens, slice(3, 7)), layer(tokens)[:, 3:7])
    handle = layer.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(run_linear(layer, tokens, slice(3, 7)), layer(tokens)[:, 3:7])
    handle.remove()


def test_strided_tokens():
    tokens, (_, weight) = torch.randn(4, 32)[:, ::2], given((4, 16), bias=False)
    torch.testing.assert_close(linear(tokens, weight, None), F.linear(tokens, weight))


def test_transforms_of_functions():
    tokens, weight = (tensor.detach() for tensor in given((5, 4, 16), bias=False))

    def energy(w, x):
        return linear(x, w, None).square().sum()

    def expected(w, x):
        return F.linear(x, w).square().sum()

    for function in (torch.func.grad, torch.func.jacfwd):
        each = torch.func.vmap(function(energy), in_dims=(None, 0))(weight, tokens)
        other = torch.func.vmap(function(expected), in_dims=(None, 0))(weight, tokens)
        torch.testing.assert_close(each, other)


def test_autocast_is_torchs():
    tokens, weight, bias = given((4, 16), bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = linear(tokens, weight, bias)
        assert torch.equal(output, F.linear(tokens, weight, bias))
    assert output.dtype == torch.bfloat16


def test_multiply_adds_are_counted():
    tokens, weight = torch.randn(64, 256), torch.randn(128, 256)
    assert attnkit.count_multiply_adds(linear, tokens, weight, None) == 64 * 256 * 128


def test_hooks_run():
    layer, seen = nn.Linear(16, 4), []
    assert is_linear(layer)
    for register in (
        layer.register_forward_hook,
        layer.register_forward_pre_hook,
        layer.register_full_backward_hook,
        layer.register_full_backward_pre_hook,
    ):
        handle = register(lambda *_: seen.append(1))
        assert not is_linear(layer)
        run_linear(layer, torch.randn(3, 16, requires_grad=True)).sum().backward()
        handle.remove()
    assert len(seen) == 4


def test_a_block_trains_by_it_as_by_torch(monkeypatch):
    torch.manual_seed(0)
    block = TransformerBlock(32, 4)
    tokens = torch.randn(2, 9, 32)
    parameters = list(block.parameters())
    ours = torch.autograd.grad(block(tokens).square().sum(), parameters)
    monkeypatch.setattr(file, "ONEDNN", None)
    theirs = torch.autograd.grad(block(tokens).square().sum(), parameters)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
