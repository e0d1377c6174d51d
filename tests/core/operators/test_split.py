"""A fused projection taken apart, against torch's split."""

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import attnkit
from attnkit.core.operators import split
from attnkit.core.operators.split import split_channels

SIZES = [3, 3, 5]


def test_gradients_of_any_order():
    tensor = torch.randn(2, 4, 11, dtype=torch.float64, requires_grad=True)

    def function(x):
        first, second, third = split_channels(x, SIZES)
        return (first * second).sin(), third.exp()

    assert gradcheck(function, tensor)
    assert gradgradcheck(function, tensor)


def test_forward_derivatives():
    with forward_ad.dual_level():
        tensor = torch.randn(4, 11, requires_grad=True)
        tangent = torch.randn(4, 11)
        parts = split_channels(forward_ad.make_dual(tensor, tangent), SIZES)
        found = [forward_ad.unpack_dual(part).tangent for part in parts]
    torch.testing.assert_close(torch.cat(found, dim=1), tangent)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=["in order", "in another order"])
def test_gradients_next_to_each_other_are_not_copied(order):
    gradient = torch.randn(4, 9)
    parts = gradient.split(3, dim=1)
    tensor = torch.randn(4, 9, requires_grad=True)
    given = [parts[i] for i in order]
    (found,) = torch.autograd.grad(split_channels(tensor, [3, 3, 3]), tensor, given)
    assert torch.equal(found, torch.cat(given, dim=1))
    assert (found.data_ptr() == gradient.data_ptr()) == (order == (0, 1, 2))


def test_parts_of_other_tensors_are_joined():
    tensor = torch.randn(4, 9, requires_grad=True)
    given = [torch.randn(4, 3), torch.randn(4, 3).expand(4, 3), torch.randn(3, 4).T]
    (found,) = torch.autograd.grad(split_channels(tensor, [3, 3, 3]), tensor, given)
    assert torch.equal(found, torch.cat(given, dim=1))


def test_a_part_that_is_not_used_has_the_gradient_zero():
    tensor = torch.randn(4, 9, requires_grad=True)
    first, _, third = split_channels(tensor, [3, 3, 3])
    (found,) = torch.autograd.grad((first + 2 * third).sum(), tensor)
    assert torch.equal(found, torch.tensor([1.0, 0.0, 2.0]).repeat_interleave(3).expand(4, 9))


def test_graph_layers_leave_their_gradients_next_to_each_other(monkeypatch):
    found, whole = [], split._whole
    monkeypatch.setattr(split, "_whole", lambda parts: found.append(whole(parts)) or found[-1])
    layer, x = attnkit.GraphAttention(12, 8, heads=2), torch.randn(30, 12)
    weight = layer.projections.node_proj.in_proj.weight
    results = []
    for backend in ("edges_numba", "reference"):
        layer.backend = backend
        output = layer(x, torch.randint(30, (2, 90), generator=torch.manual_seed(0)))
        results.append(torch.autograd.grad(output.square().sum(), weight)[0])
    assert [tensor is not None for tensor in found] == [True, False]
    torch.testing.assert_close(*results)


def test_fewer_queries_than_keys_of_one_projection():
    """Their gradients have no common rows, though they begin side by side."""
    edges = attnkit.Edges(torch.randint(5, (2, 90), generator=torch.manual_seed(0)), (30, 5))
    results = []
    for backend in ("edges_numba", "reference"):
        packed = torch.randn(30, 48, generator=torch.manual_seed(1), requires_grad=True)
        parts = (part.unflatten(1, (2, 8)) for part in packed.split(16, dim=1))
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        output = attnkit.attend(query[:, :, :5], key, value, mask=edges, backend=backend)
        results.append(torch.autograd.grad(output.square().sum(), packed)[0])
    torch.testing.assert_close(*results)
