"""Forward-mode and second derivatives: every kernel is right, or says that it has none and what
has."""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp
from torch.utils.checkpoint import checkpoint

import attnkit
from attnkit import attend
from attnkit.core.kernels.choose import BACKENDS

TOKENS, STEP = 5, 1e-5
VECTOR = torch.linspace(-1, 1, 4, dtype=torch.float64)
REVERSED = torch.stack([torch.arange(TOKENS), torch.arange(TOKENS).flip(0)])
CASES = {
    "dot": {},
    "general": {"score": attnkit.General(torch.outer(VECTOR, VECTOR.flip(0)))},
    "cosine": {"score": "cosine"},
    "gaussian": {"score": "gaussian"},
    "softcap": {"score": attnkit.Gaussian(softcap=2.0)},
    "additive": {"score": attnkit.Additive(VECTOR)},
    "leaky_relu": {"score": attnkit.Additive(VECTOR, "leaky_relu")},
    "causal": {"mask": attnkit.Causal()},
    "window": {"mask": attnkit.Window(1, 1)},
    "edges": {"mask": attnkit.Edges(REVERSED, TOKENS)},
    "edges_additive": {"mask": attnkit.Edges(REVERSED, TOKENS), "score": attnkit.Additive(VECTOR)},
    "packed": {"mask": attnkit.Packed([2, 3])},
    "packed_additive": {"mask": attnkit.Packed([2, 3]), "score": attnkit.Additive(VECTOR)},
    "bias": {"bias": torch.linspace(-1, 1, 25, dtype=torch.float64).view(5, 5)},
    "linear": {"normalizer": "linear", "mask": attnkit.Causal()},
    "hard": {"normalizer": attnkit.Hard(None)},
    "delta_rule": {
        "normalizer": attnkit.DeltaRule(torch.linspace(0.1, 0.9, TOKENS).double()[None, None]),
        "mask": attnkit.Causal(),
    },
}


def dual(function, x, towards):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, towards))).tangent


def by_torch_func(function, x, towards):
    return jvp(function, (x,), (towards,))[1]


def loss_of(function):
    return lambda x: function(x).square().sum()


def gradient(function, x, **options):
    return torch.autograd.grad(loss_of(function)(x), x, **options)[0]


def twice(function, x, towards):
    x = x.clone().requires_grad_()
    first = gradient(function, x, create_graph=True)
    return torch.autograd.grad((first * towards).sum(), x)[0]


def forward_over_reverse(function, x, towards):
    return jvp(grad(loss_of(function)), (x,), (towards,))[1]


def reverse_over_reverse(function, x, towards):
    return grad(lambda x: (grad(loss_of(function))(x) * towards).sum())(x)


FIRST, SECOND = (dual, by_torch_func), (twice, forward_over_reverse, reverse_over_reverse)


def difference(function, x, towards):
    return (function(x + STEP * towards) - function(x - STEP * towards)) / (2 * STEP)


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_is_right_or_says_what_is(name):
    torch.manual_seed(0)
    x, towards = torch.randn(2, 3, 1, 2, TOKENS, 4, dtype=torch.float64)

    def attention(x, backend="reference"):
        return attend(*x, backend=backend, **CASES[name])

    def first_gradient(x):
        return gradient(attention, x.requires_grad_())

    right = dict.fromkeys(FIRST, difference(attention, x, towards))
    right |= dict.fromkeys(SECOND, difference(first_gradient, x, towards))
    reasons = attnkit.explain_backends(*x, **CASES[name]).reasons
    served = {kernel.name for kernel in BACKENDS if not reasons[kernel.name]}
    for backend in ("auto", *served):
        for derivative, expected in right.items():
            error, found = "", None
            try:
                found = derivative(partial(attention, backend=backend), x, towards)
            except (RuntimeError, attnkit.UnsupportedError) as refused:
                error = str(refused)
            if error:
                assert "backend='math' has" in error or "backend='reference' has" in error
                # auto cannot know that the gradient will be differentiated
                assert backend != "auto" or derivative is twice
            else:
                found = torch.zeros_like(expected) if found is None else found
                torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-6)


CHECKPOINTED = {
    "window": {"mask": attnkit.Window(1, 1), "backend": "block_sparse"},
    "sink": {"sink": VECTOR[:2], "backend": "flash"},
    "sink_window": {
        "sink": VECTOR[:2], "mask": attnkit.Window(1, 1), "backend": "block_sparse"
    },
    "edges": {"mask": attnkit.Edges(REVERSED, TOKENS), "backend": "edges"},
}  # fmt: skip


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_kernel_with_a_backward_of_its_own_in_a_checkpoint(name, use_reentrant):
    """Checkpoints of torch give the tensors that a backward saved once."""
    tensors = [torch.randn(1, 2, TOKENS, 4, dtype=torch.float64) for _ in range(3)]
    attention = partial(attend, **CHECKPOINTED[name])
    both = []
    for run in (attention, partial(checkpoint, attention, use_reentrant=use_reentrant)):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        run(*inputs).sin().sum().backward()
        both.append([tensor.grad for tensor in inputs])
    torch.testing.assert_close(*both)
