"""Graphs of every kind, of 13 sources and 11 targets, and numbers to attend with."""

import torch

from attnkit import Edges


def random_graph(num_sources=13, num_targets=11, num_edges=41, seed=0):
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


def results(output, inputs):
    towards = (torch.arange(output.numel()) % 17 - 8).view_as(output) / 8
    return [
        output,
        *torch.autograd.grad(output, inputs, towards.to(output.dtype), allow_unused=True),
    ]
