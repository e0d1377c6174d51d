"""Graphs of every kind, of 13 sources and 11 targets, and numbers and scores to attend with."""

from functools import partial

import torch

import attnkit
from attnkit import Additive, Cosine, Edges, Gaussian, General, attend

BATCH, HEADS, TARGETS, SOURCES, VALUE_DIM = 2, 3, 11, 13, 7
# head_dim, the score of its parameters, and their shapes
SCORES = {
    "scaled_dot": (5, lambda: "scaled_dot", []),
    "general": (5, General, [(HEADS, 5, 5)]),
    "cosine": (13, lambda scale: Cosine(scale.abs() + 1), [(HEADS,)]),
    "gaussian": (5, lambda width: Gaussian(width.abs() + 1), [(HEADS,)]),
    "tanh": (5, Additive, [(HEADS, 5)]),
    "gatv2": (17, partial(Additive, activation="leaky_relu", negative_slope=0.3), [(HEADS, 17)]),
    "relu": (5, partial(Additive, activation="leaky_relu", negative_slope=0.0), [(5,)]),
    "gat": (1, partial(Additive, activation="leaky_relu", negative_slope=0.2), [(HEADS, 1)]),
    "softcap": (5, lambda: attnkit.ScaledDot(softcap=1.0), []),
}


def random_graph(num_sources=SOURCES, num_targets=TARGETS, num_edges=41, seed=0):
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(num_sources, (num_edges,), generator=generator)
    target = torch.randint(num_targets - 2, (num_edges,), generator=generator)
    return torch.stack([source, target])  # the last two targets have no edges


def graphs():
    some = random_graph()
    hub = torch.stack([torch.arange(37) % 13, torch.full((37,), 4)])
    complete = torch.cartesian_prod(torch.arange(13), torch.arange(11)).T
    return {
        "some": Edges(some, 11, 13),
        "sorted": Edges(some[:, some[1].argsort(stable=True)], 11, 13),
        "repeated": Edges(torch.cat([some, some[:, :7]], dim=1), 11, 13),
        "hub": Edges(torch.cat([hub, some], dim=1), 11, 13),
        "complete": Edges(complete, 11, 13),
        "one edge": Edges(some[:, :1], 11, 13),
        "no edges": Edges(some[:, :0], 11, 13),
        "self loops": Edges(torch.arange(11).expand(2, -1), 11, 13),
    }


def rand(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def given(score, num_targets=TARGETS, num_sources=SOURCES, dtype=torch.float64):
    """Query, key, value and the score's parameters; and the score as a function of them all."""
    dim, make, shapes = SCORES[score]
    inputs = [
        rand(BATCH, HEADS, num_targets, dim, seed=1, dtype=dtype),
        rand(BATCH, HEADS, num_sources, dim, seed=2, dtype=dtype),
        rand(BATCH, HEADS, num_sources, VALUE_DIM, seed=3, dtype=dtype),
        *(rand(*shape, seed=4 + place, dtype=dtype) for place, shape in enumerate(shapes)),
    ]
    return inputs, lambda tensors: make(*tensors[3:])


def results(output, inputs):
    towards = (torch.arange(output.numel()) % 17 - 8).view_as(output) / 8
    towards = towards.to(output.dtype)
    gradients = torch.autograd.grad(output, inputs, towards, materialize_grads=True)
    return [output, *gradients]


def assert_is_the_definition(kernel, inputs, make_options):
    """Output and gradients are those of the definition in float64. Those of a kernel in float32 are
    about as near to them as the definition in float32 is. Returns the output."""
    dtype = torch.float32 if kernel == "edges_numba" else torch.float64
    narrow = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    wide = [tensor.detach().double().requires_grad_() for tensor in narrow]
    expected = results(attend(*wide[:3], **make_options(wide), backend="reference"), wide)
    plain = results(attend(*narrow[:3], **make_options(narrow), backend="reference"), narrow)
    with attnkit.record_backends() as record:
        output = attend(*narrow[:3], **make_options(narrow), backend=kernel)
    assert record.total() == {kernel: 1}
    largest = max(tensor.abs().max() for tensor in expected)
    least, rtol = (2e-6, 1e-5) if dtype == torch.float32 else (1e-10, 1e-8)
    for ours, theirs, rounded in zip(results(output, narrow), expected, plain, strict=True):
        bound = 3 * (rounded - theirs).abs().max() + least * largest
        torch.testing.assert_close(ours.double(), theirs, atol=bound.item(), rtol=rtol)
    return output
