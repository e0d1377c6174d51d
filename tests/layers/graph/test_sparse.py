"""Sparse features: every function against the dense one that torch has."""

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from attnkit.layers.graph.sparse import (
    SparseDropout,
    SparseLinear,
    ranges,
    sparse_rows,
)


def features(rows=13, columns=11, share=0.3, dtype=torch.float64):
    x = torch.randn(rows, columns, dtype=dtype) * (torch.rand(rows, columns) < share)
    x[5] = 0  # a node without features
    return x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_the_dense_one(dtype, bias):
    x = features(dtype=dtype)
    layer = SparseLinear(11, 7, bias=bias).to(dtype)
    upstream = torch.randn(13, 7, dtype=dtype)
    results = []
    for given in (x, x.to_sparse_csr()):
        output = layer(given)
        gradients = torch.autograd.grad(output, list(layer.parameters()), upstream)
        results.append([output, *gradients])
    dense = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(results[0][0], dense)
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert ours.layout == torch.strided
        torch.testing.assert_close(ours, theirs)


def test_weight_gradient_is_that_of_numerical_differences():
    x = features(7, 5).to_sparse_csr()
    layer = SparseLinear(5, 3, dtype=torch.float64)
    torch.autograd.gradcheck(
        lambda *tensors: functional_call(layer, dict(zip(("weight", "bias"), tensors)), x),  # noqa: B905
        tuple(layer.parameters()),
    )


def test_dropout_keeps_scales_and_drops_the_right_share():
    x = torch.ones(101, 103, dtype=torch.float64).to_sparse_csr()
    dropped = SparseDropout(0.6)(x)
    values = dropped.values()
    assert torch.equal(dropped.col_indices(), x.col_indices())
    assert torch.equal(dropped.crow_indices(), x.crow_indices())
    kept = values != 0
    torch.testing.assert_close(values[kept], torch.full_like(values[kept], 1 / 0.4))
    share, deviation = kept.double().mean().item(), (0.4 * 0.6 / values.numel()) ** 0.5
    assert abs(share - 0.4) < 5 * deviation
    assert torch.equal(x.values(), torch.ones(101 * 103, dtype=torch.float64))  # not in place


def test_dropout_is_for_training_only_and_takes_both_layouts():
    x = features()
    dropout = SparseDropout(0.5)
    torch.manual_seed(3)
    dense = dropout(x)
    torch.manual_seed(3)
    assert torch.equal(dense, F.dropout(x, 0.5))
    assert not torch.equal(dropout(x.to_sparse_csr()).to_dense(), x)
    dropout.eval()
    sparse = x.to_sparse_csr()
    assert dropout(sparse) is sparse
    assert torch.equal(dropout(x), x)
    assert SparseDropout(0.0)(sparse) is sparse


def test_rows_are_those_of_the_dense_matrix():
    x = features()
    rows = torch.tensor([7, 5, 0, 12, 7])
    chosen = sparse_rows(x.to_sparse_csr(), rows)
    assert chosen.layout == torch.sparse_csr
    assert torch.equal(chosen.to_dense(), x[rows])
    assert sparse_rows(x.to_sparse_csr(), rows[:0]).shape == (0, 11)


def test_ranges():
    starts, counts = torch.tensor([5, 0, 9]), torch.tensor([2, 0, 3])
    assert ranges(starts, counts).tolist() == [5, 6, 9, 10, 11]


def test_what_is_not_sparse_is_refused():
    x = features()
    with pytest.raises(TypeError, match="x: expected a sparse CSR matrix, got torch"):
        sparse_rows(x.to_sparse(), torch.arange(3))
    wanted = x.to_sparse_csr().requires_grad_()
    with pytest.raises(ValueError, match="x: expected features without a gradient"):
        SparseLinear(11, 7, dtype=torch.float64)(wanted)
