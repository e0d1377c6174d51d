"""∂y/∂A without A, through whatever ran, against autograd through the eager matrices."""

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import attnkit
from attnkit.core.capture.watch import watch_attention

CLASS = 3


def make_vit(**options):
    torch.manual_seed(1)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=12, num_heads=3, depth=3,
        num_classes=5, **options,
    )  # fmt: skip
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def images():
    torch.manual_seed(2)
    return torch.randn(2, 3, 32, 32)


def eager_weights_and_gradients(model, x):
    """A and ∂y/∂A by autograd through timm's eager attention."""
    seen, handles = [], []
    for block in model.blocks:
        block.attn.fused_attn = False
        handles.append(block.attn.attn_drop.register_forward_hook(lambda *a: seen.append(a[-1])))
    gradients = torch.autograd.grad(model(x)[:, CLASS].sum(), seen)
    for block, handle in zip(model.blocks, handles, strict=True):
        block.attn.fused_attn = True
        handle.remove()
    return [weights.detach() for weights in seen], gradients


def output_gradients(y, calls, **options):
    return torch.autograd.grad(y, [call.output for call in calls], **options)


def watched(model, x, **options):
    with watch_attention(model) as calls:
        y = model(x)[:, CLASS].sum()
        return calls, output_gradients(y, calls, **options)


def assert_gradients_are(calls, gradients, expected, **tolerance):
    tolerance = tolerance or {"atol": 1e-5, "rtol": 1e-4}
    for call, gradient, weights, by_autograd in zip(calls, gradients, *expected, strict=True):
        torch.testing.assert_close(call.weights(), weights, **tolerance)
        torch.testing.assert_close(call.weight_gradient(gradient), by_autograd, **tolerance)


def test_a_vit_of_timm_and_relevance_as_a_row():
    model, x = make_vit(), images()
    weights, by_autograd = eager_weights_and_gradients(model, x)
    calls, gradients = watched(model, x)
    assert [call.layer for call in calls] == [f"blocks.{place}.attn" for place in range(3)]
    assert_gradients_are(calls, gradients, (weights, by_autograd))
    relevance = torch.eye(17).expand(2, -1, -1)
    row = F.one_hot(torch.tensor([0, 0]), 17).float()
    for a, g in zip(weights, by_autograd, strict=True):
        relevance = relevance + (a * g).relu().mean(dim=1) @ relevance
    for call, gradient in zip(reversed(calls), reversed(gradients), strict=True):
        row = row + call.propagate(row, output_gradient=gradient)
    torch.testing.assert_close(row, relevance[:, 0], atol=1e-6, rtol=1e-5)


def test_checkpointed_activations_are_told_once():
    model, x = make_vit(), images()
    expected = eager_weights_and_gradients(model, x)
    model.set_grad_checkpointing()
    model.train()  # timm checkpoints in training
    calls, gradients = watched(model, x)
    assert len(calls) == 3
    assert_gradients_are(calls, gradients, expected)
    with attnkit.capture_attention(model) as captured:
        model(x).sum().backward()
    assert [len(weights) for weights in captured.values()] == [1, 1, 1]


class Checkpointed(nn.Module):
    def __init__(self, attention, **options):
        super().__init__()
        self.attention = attention
        self.options = options

    def forward(self, x):
        return checkpoint(self.attention, x, **self.options)


class TorchsOwn(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: attnkit.MultiHeadAttention(12, 3),
        lambda: TorchsOwn(True),
        lambda: TorchsOwn(False),
    ],
)
def test_checkpoints_around_any_attention(make):
    torch.manual_seed(1)
    attention = make()
    x = torch.randn(2, 7, 12, requires_grad=True)
    results = []
    for module in (attention, Checkpointed(attention, use_reentrant=False)):
        with watch_attention(module) as calls:
            y = module(x).tanh().sum()
            (call,) = calls
            (gradient,) = output_gradients(y, calls, retain_graph=True)
            y.backward()
        assert len(calls) == 1
        results.append([call.weights(), call.weight_gradient(gradient), call.output, x.grad])
        x.grad = None
    for plain, checkpointed in zip(*results, strict=True):
        torch.testing.assert_close(checkpointed, plain)


@pytest.mark.parametrize("ours", [False, True])
def test_autocast_to_half_precision(ours):
    model, x = make_vit(), images()
    if ours:
        attnkit.replace_attention(model)
    _, by_autograd = eager_weights_and_gradients(make_vit(), x)
    with torch.autocast("cpu", torch.bfloat16):
        calls, gradients = watched(model, x)
        with attnkit.capture_attention(model) as captured:
            model(x)
    for call, gradient, expected in zip(calls, gradients, by_autograd, strict=True):
        assert call.query.dtype == torch.bfloat16
        weights = call.weights()
        assert weights.dtype == torch.float32
        exact = (call.query.float() @ call.key.float().mT * 4**-0.5).softmax(dim=-1)
        torch.testing.assert_close(weights, exact.detach())
        torch.testing.assert_close(
            (weights @ call.value.float()).bfloat16(), call.output, atol=2e-2, rtol=2e-2
        )
        actual = call.weight_gradient(gradient)
        assert F.cosine_similarity(actual.flatten(), expected.flatten(), dim=0) > 0.98
    assert {weights[0].dtype for weights in captured.values()} == {torch.bfloat16}
