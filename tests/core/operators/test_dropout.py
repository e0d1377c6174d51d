"""Dropout against torch's: the same law, and a generator that is read."""

import pytest
import torch

from attnkit.core.operators.cpu import dropout, keep_mask


@pytest.mark.parametrize("p", [1e-4, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_keeps_the_right_share_and_scales_it(p, dtype):
    count = 200_001
    kept = keep_mask(torch.empty(count, dtype=dtype), p)
    assert kept.dtype == dtype
    assert set(kept.unique().tolist()) == {0.0, float(torch.tensor(1 / (1 - p), dtype=dtype))}
    share, deviation = (kept != 0).double().mean().item(), (p * (1 - p) / count) ** 0.5
    assert abs(share - (1 - p)) < 5 * deviation


def test_neighbours_are_drawn_apart():
    # numbers are drawn by twos from one of 64 bits
    kept = (keep_mask(torch.empty(400_000), 0.5) != 0).double().view(-1, 2)
    both = kept.prod(dim=1).mean().item()
    assert abs(both - 0.25) < 5 * (0.25 * 0.75 / 200_000) ** 0.5


def test_a_generator_gives_the_same_again():
    like = torch.empty(7, 11)
    draws = [keep_mask(like, 0.5, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*draws)
    torch.manual_seed(5)
    first = keep_mask(like, 0.5)
    torch.manual_seed(5)
    assert torch.equal(first, keep_mask(like, 0.5))
    assert not torch.equal(first, keep_mask(like, 0.5))


def test_gradient_is_of_what_was_kept():
    x = torch.randn(50, 3, requires_grad=True)
    output = dropout(x, 0.5)
    output.sum().backward()
    torch.testing.assert_close(x.grad * x, output)


def test_inside_of_transforms_it_is_torchs():
    torch.manual_seed(0)
    x = torch.randn(4, 9)
    output = torch.vmap(lambda row: dropout(row, 0.5), randomness="different")(x)
    assert ((output == 0) | torch.isclose(output, 2 * x)).all()
    assert torch.equal(dropout(x, 0.0), x)
    assert torch.equal(dropout(x, 1.0), torch.zeros_like(x))
