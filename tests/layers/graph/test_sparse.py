"""Sparse features: every function against the dense one that torch has."""

import pytest
import torch
from torch.nn import functional as F

from attnkit.core.masks.adjacency import Adjacency
from attnkit.core.operators.sparse import first_rows, linear, sparse_rows
from attnkit.layers.graph.blocks import SparseDropout, SparseLinear


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


def test_second_derivative_is_the_dense_one():
    x = features()
    weight = torch.randn(7, 11, dtype=torch.float64, requires_grad=True)
    found = []
    for given in (x, x.to_sparse_csr()):
        output = linear(given, weight, None).pow(3).sum()
        (gradient,) = torch.autograd.grad(output, weight, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), weight)[0])
    torch.testing.assert_close(*found)


def test_dropout_keeps_the_pattern_and_is_for_training_only():
    x = features()
    sparse = x.to_sparse_csr()
    dropout = SparseDropout(0.6)
    dropped = dropout(sparse)
    assert torch.equal(dropped.col_indices(), sparse.col_indices())
    assert torch.equal(dropped.crow_indices(), sparse.crow_indices())
    assert torch.equal(sparse.to_dense(), x)  # not in place
    torch.manual_seed(3)
    dropped = dropout(sparse).values()
    torch.manual_seed(3)
    assert torch.equal(dropped, dropout(sparse.values()))  # the same law for both layouts
    dropout.eval()
    assert dropout(sparse) is sparse
    assert torch.equal(dropout(x), x)
    assert SparseDropout(0.0)(sparse) is sparse


def test_the_columns_are_sorted_once_for_all_dropouts(monkeypatch):
    x = features(dtype=torch.float32).to_sparse_csr()
    made = []
    of = Adjacency.of
    monkeypatch.setattr(Adjacency, "of", lambda *args: made.append(1) or of(*args))
    layer, dropout = SparseLinear(11, 7), SparseDropout(0.5)
    for _ in range(3):
        layer(dropout(x)).sum().backward()
        layer(x).sum().backward()
    assert len(made) == 1


def test_first_rows_are_those_of_the_dense_matrix():
    x = features()
    for given in (x, x.to_sparse_csr()):
        for count in (0, 6, 13):
            rows = first_rows(given, count)
            assert rows.layout == given.layout
            assert torch.equal(rows.to_dense(), x[:count])
    layer = SparseLinear(11, 7, dtype=torch.float64)
    torch.testing.assert_close(layer(first_rows(x.to_sparse_csr(), 6)), layer(x)[:6])


def test_rows_are_those_of_the_dense_matrix():
    x, rows = features(), torch.tensor([7, 5, 0, 12, 7])
    chosen = sparse_rows(x.to_sparse_csr(), rows)
    assert chosen.layout == torch.sparse_csr
    assert torch.equal(chosen.to_dense(), x[rows])
    assert sparse_rows(x.to_sparse_csr(), rows[:0]).shape == (0, 11)


def test_what_is_not_sparse_is_refused():
    x = features()
    with pytest.raises(TypeError, match="x: expected a sparse CSR matrix, got torch"):
        sparse_rows(x.to_sparse(), torch.arange(3))
    wanted = x.to_sparse_csr().requires_grad_()
    with pytest.raises(ValueError, match="x: expected sparse features without requires_grad"):
        SparseLinear(11, 7, dtype=torch.float64)(wanted)
