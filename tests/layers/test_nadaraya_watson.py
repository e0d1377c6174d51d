"""Nadaraya–Watson regression against scikit-learn's and scipy's kernels."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.metrics.pairwise import rbf_kernel

import attnkit

SAMPLES, POINTS = 61, 37


def samples(offset=0.0):
    generator = np.random.default_rng(0)
    x = np.sort(generator.uniform(0, 5, (SAMPLES, 1)), axis=0) + offset
    y = 2 * np.sin(x - offset) + x - offset + generator.normal(0, 0.3, x.shape)
    return np.linspace(-1, 6, POINTS)[:, None] + offset, x, y


def tensors(arrays, dtype):
    return [torch.tensor(array, dtype=dtype) for array in arrays]


@pytest.mark.parametrize("bandwidth", [0.1, 0.5, 3.0])
def test_equals_scikit_learn_and_scipy(bandwidth):
    points, x, y = samples()
    by_sklearn = rbf_kernel(points, x, gamma=1 / (2 * bandwidth**2))
    by_scipy = np.exp(-cdist(points, x, "sqeuclidean") / (2 * bandwidth**2))
    model = attnkit.NadarayaWatson(bandwidth).double()
    actual = model(*tensors((points, x, y), torch.float64)).detach().numpy()
    for kernel in (by_sklearn, by_scipy):
        expected = kernel @ y / kernel.sum(axis=1, keepdims=True)
        # the bandwidth went through a float32 parameter
        np.testing.assert_allclose(actual, expected, rtol=1e-4 if bandwidth < 0.2 else 1e-5)
    assert np.ptp(actual) > 0.2


def test_float32_far_from_zero_equals_float64_near_it():
    # multiples of a power of 2, which float32 holds exactly beside 2,048
    points, x, y = (np.round(array * 64) / 64 for array in samples())
    near = attnkit.NadarayaWatson(0.4)(*tensors((points, x, y), torch.float64))
    far = attnkit.NadarayaWatson(0.4)(*tensors((points + 2048, x + 2048, y), torch.float32))
    torch.testing.assert_close(far.double(), near, atol=1e-5, rtol=1e-5)


def test_far_from_all_samples_is_the_nearest_one():
    _, x, y = tensors(samples(), torch.float32)
    far = torch.tensor([[-1e3], [1e3]])
    torch.testing.assert_close(attnkit.NadarayaWatson(0.1)(far, x, y), y[[0, -1]])


def test_the_bandwidth_is_learned_by_leaving_one_out():
    _, x, y = tensors(samples(), torch.float32)
    others = ~torch.eye(SAMPLES, dtype=torch.bool)

    def loss(model):
        return (model(x, x, y, mask=others) - y).square().mean()

    model = attnkit.NadarayaWatson(5.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    candidates = np.geomspace(0.05, 5, 41)
    errors = [loss(attnkit.NadarayaWatson(float(b))).item() for b in candidates]
    assert loss(model).item() < 1.05 * min(errors)
    assert loss(model).item() < 0.2 * errors[-1]
    fixed = attnkit.NadarayaWatson(0.7, learnable=False)
    assert not fixed(x, x, y).requires_grad


def test_batches_and_kernels():
    query, key = torch.randn(3, 5, 2), torch.randn(3, 7, 2)
    value = torch.randn(3, 7, 11)
    model = attnkit.NadarayaWatson(0.7)
    output = model(query, key, value)
    assert output.shape == (3, 5, 11)
    torch.testing.assert_close(output[1], model(query[1], key[1], value[1]))
    with attnkit.record_backends() as record:
        attnkit.NadarayaWatson(0.7, backend="blockwise")(query, key, value)
        model(query, key, value)
    assert record.counts == {"": {"blockwise": 1, "flash": 1}}


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="bandwidth: expected a positive number, got 0"):
        attnkit.NadarayaWatson(0)
    with pytest.raises(ValueError, match=r"query: expected \[queries, dim\] or"):
        attnkit.NadarayaWatson()(torch.ones(3), torch.ones(5), torch.ones(5))
