"""ELU against torch's."""

import pytest
import torch
from torch.nn import functional as F

from attnkit.core.operators.elu import elu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_torchs_within_a_rounding_of_one(dtype):
    special = torch.tensor([0.0, -0.0, 1e-9, -1e-9, -1e-4, 100, -100, 1e30, -1e30], dtype=dtype)
    infinite = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype)
    x = torch.cat([special, infinite, torch.randn(1000, dtype=dtype)])
    precision = {"rtol": 0, "atol": torch.finfo(dtype).eps, "equal_nan": True}
    torch.testing.assert_close(elu(x), F.elu(x), **precision)
    gradients = []
    for function in (elu, F.elu):
        copy = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(function(copy).sum(), copy)[0])
    torch.testing.assert_close(*gradients, **precision)


def test_derivatives_of_both_orders():
    x = torch.randn(20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(elu, x)
    assert torch.autograd.gradgradcheck(elu, x)
    assert torch.equal(torch.vmap(elu)(x), F.elu(x))


def test_low_precision_is_torchs():
    x = torch.linspace(-1, 1, 99, dtype=torch.bfloat16)
    assert torch.equal(elu(x), F.elu(x))
