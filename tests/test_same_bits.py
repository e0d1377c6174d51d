"""The same values give the same bits on a CPU, forward and backward: at other addresses, and in a
process that has computed other things before as in one that begins with them.

A job that was stopped goes on in a new process, whose first batch is recorded, and must end as if
it had not been stopped.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import attnkit
from attnkit import Causal, Edges, Packed, Padding, Window, Window2d
from attnkit.layers.transformer import DecoderBlock
from attnkit.models.resnet import ResNet


class Attend(nn.Module):
    """A kernel, of queries, keys and values."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value):
        return attnkit.attend(query, key, value, **self.options)


class OfGraph(nn.Module):
    """A layer that reads a graph."""

    def __init__(self, layer, edges, is_sparse=False):
        super().__init__()
        self.layer, self.edges, self.is_sparse = layer, edges, is_sparse

    def forward(self, x, *features):
        x = (x.detach() * (x > 1)).to_sparse_csr() if self.is_sparse else x
        return self.layer(x, self.edges, *features)


def heads(size, num=131, dim=16):
    return [(size, 4, num, dim)] * 3


def graph(size, num=601):
    generator = torch.Generator().manual_seed(size)
    return Edges(torch.randint(num, (2, 4001 + size), generator=generator), num)


def kernel(sizes=heads, **options):
    return lambda size: (Attend(**options), sizes(size))


def graph_layer(score, is_sparse=False, **options):
    def make(size):
        layer = attnkit.GraphAttention(40, 16, 4, score=score, residual=True, **options)
        shapes = [(601, 40), *([(4001 + size, 3)] if "edge_dim" in options else [])]
        return OfGraph(layer, graph(size), is_sparse), shapes

    return make


CASES = {
    # what computes, and the shapes of its inputs, of a batch of that size
    "math": kernel(backend="math"),
    "flash": kernel(backend="flash", mask=Causal()),
    "padding": lambda size: (Attend(mask=Padding(torch.arange(size) + 90)), heads(size)),
    "window": kernel(mask=Window(9, 9)),
    "window of a grid": kernel(lambda size: heads(size, 144), mask=Window2d(12, 12, 2, 2)),
    "packed": lambda size: (
        Attend(mask=Packed(torch.tensor([30, 40 + size]))), heads(1, 70 + size)
    ),
    "blockwise": kernel(backend="blockwise"),
    "reference": kernel(backend="reference"),
    "linear": kernel(normalizer="linear"),
    "cosine": kernel(score="cosine"),
    "additive": kernel(lambda size: heads(size, 61), score=attnkit.Additive(torch.ones(16))),
    "edges": lambda size: (Attend(mask=graph(size)), [(1, 4, 601, 16)] * 3),
    "edges by operators": lambda size: (
        Attend(mask=graph(size), backend="edges"), [(1, 4, 601, 16)] * 3
    ),
    "self": lambda size: (attnkit.MultiHeadAttention(96, 3), [(size, 67, 96)]),
    "cross": lambda size: (
        attnkit.MultiHeadAttention(96, 3, key_dim=80), [(size, 17, 96), (size, 67, 80)]
    ),
    "delta rule": lambda size: (
        Attend(normalizer=attnkit.DeltaRule(torch.full((size, 4, 131), 0.3)), mask=Causal()),
        heads(size),
    ),
    "pool": lambda size: (attnkit.AttentionPool(96, 3, mlp_ratio=2.0), [(size, 67, 96)]),
    "decoder": lambda size: (DecoderBlock(96, 3), [(size, 17, 96), (size, 67, 96)]),
    "vit": lambda size: (
        attnkit.ViT(image_size=32, patch_size=4, dim=96, depth=2, num_heads=3, num_classes=10),
        [(size, 3, 32, 32)],
    ),
    "cnn": lambda size: (attnkit.CNNEncoder(image_size=32, dim=32), [(size, 3, 32, 32)]),
    "resnet": lambda size: (ResNet(3, 10, widths=(8, 16)), [(size, 3, 16, 16)]),
    "spatial": lambda size: (attnkit.SpatialAttention(32, num_heads=2), [(size, 32, 12, 12)]),
    "channel": lambda size: (attnkit.ChannelAttention(32), [(size, 32, 12, 12)]),
    "cbam": lambda size: (attnkit.CBAM(32), [(size, 32, 12, 12)]),
    "graph, scaled_dot": graph_layer("scaled_dot", edge_dim=3),
    "graph, gat": graph_layer("gat"),
    "graph, gatv2": graph_layer("gatv2", edge_dim=3),
    "graph, dropout": lambda size: (
        OfGraph(attnkit.GAT(40, 16, 5, heads=2, score="gatv2"), graph(size)), [(601, 40)]
    ),
    "graph, sparse features": graph_layer("gatv2", is_sparse=True),
}  # fmt: skip
SIZE = 5
OTHER_SIZES = (8,)
# Numbers of 4 bytes before the first: memory as torch and as malloc align it. At other addresses
# torch's own flash operator gives other last digits on processors without AVX-512 (EPYC of 2021).
OFFSETS = (16, 4)


def moved(tensor, offset):
    """The same values in other memory, so many numbers behind its start."""
    memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
    return memory[offset:].view(tensor.shape).copy_(tensor.detach())


def bits(name, size=SIZE, offset=0, threads=2):
    """A hash of the output and of all gradients."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        module, shapes = CASES[name](size)
        inputs = [moved(torch.randn(shape), offset).requires_grad_() for shape in shapes]
        for parameter in module.parameters():
            parameter.data = moved(parameter, offset)
        output = module(*inputs)
        towards = moved(torch.randn(output.shape), offset)
        wanted = [*inputs, *module.parameters()]
        gradients = torch.autograd.grad(output, wanted, towards, allow_unused=True)
    finally:
        torch.set_num_threads(before)
    digest = hashlib.sha256()
    for tensor in (output, *gradients):
        if tensor is not None:
            digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def in_processes_of_their_own():
    """The bits of each case in a process that has computed nothing before; it is forked from one
    that has imported everything and computed nothing."""
    for name in CASES:
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                os.write(writer, bits(name).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            print(json.dumps([name, file.read()]), flush=True)
        os.wait()


def with_a_past(name):
    """The bits of a case in a process that has computed the same of other sizes and in other
    threads."""
    for size in OTHER_SIZES:
        bits(name, size, threads=1 + size % 3)
    return bits(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_at_other_addresses_after_other_work_and_recorded(name):
    first = bits(name)
    assert with_a_past(name) == first, "after other work"
    with attnkit.record_backends():  # as the first batch of a training is
        assert bits(name) == first, "recorded"
    for offset in OFFSETS:
        assert bits(name, offset=offset) == first, f"at an offset of {4 * offset} bytes"


@pytest.mark.slow
def test_in_a_process_that_has_computed_nothing_before():
    command = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    command += f"import {Path(__file__).stem} as here; here.in_processes_of_their_own()"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fresh = dict(json.loads(line) for line in done.stdout.splitlines())
    assert "" not in fresh.values(), done.stderr
    assert {name: with_a_past(name) for name in CASES} == fresh
