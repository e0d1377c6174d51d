"""Multiply-adds against numbers worked out by hand, in every form that torch's counter misses."""

import pytest
import torch
from torch import nn

import attnkit
from attnkit import count_multiply_adds

B, H, N, M, D, V = 2, 3, 5, 7, 4, 11


def heads(num_queries=N, num_keys=M, value_dim=V):
    return (
        torch.randn(B, H, num_queries, D),
        torch.randn(B, H, num_keys, D),
        torch.randn(B, H, num_keys, value_dim),
    )


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nn.Linear(5, 7), (2, 3, 5), 2 * 3 * 5 * 7),
        (nn.Conv2d(6, 10, 3, stride=2, padding=1, groups=2), (2, 6, 9, 7), 2 * 5 * 4 * 10 * 3 * 9),
        (nn.ConvTranspose2d(3, 5, 2, stride=2), (1, 3, 7, 11), 7 * 11 * 3 * 5 * 4),
        (nn.Conv1d(3, 5, 3), (1, 3, 9), 7 * 5 * 3 * 3),
        (nn.BatchNorm2d(3), (2, 3, 5, 7), 0),
        (nn.GELU(), (2, 3), 0),
    ],
    ids=str,
)
def test_layers(module, shape, expected):
    assert count_multiply_adds(module, torch.randn(shape)) == expected


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_torchs_attention_also_on_its_fast_path(grad, training):
    dim, tokens = 8, 5
    attention = B * (4 * tokens * dim**2 + 2 * tokens**2 * dim)
    mlp = B * 2 * tokens * dim * 13
    x = torch.randn(B, tokens, dim)
    module = nn.MultiheadAttention(dim, 2, batch_first=True).train(training)
    layer = nn.TransformerEncoderLayer(dim, 2, 13, batch_first=True).train(training)
    with torch.set_grad_enabled(grad):
        assert count_multiply_adds(module, x, x, x) == attention
        assert count_multiply_adds(module, x, x, x, need_weights=False) == attention
        assert count_multiply_adds(layer, x) == attention + mlp
    assert torch.backends.mha.get_fastpath_enabled()


ATTENTION = {
    **{
        backend: (heads(value_dim=D), {"backend": backend}, B * H * N * M * (D + D))
        for backend in ("flash", "math", "reference", "blockwise")
    },
    "additive": (heads(), {"score": attnkit.Additive(torch.randn(H, D))}, B * H * N * M * (D + V)),
    # the memory is written and read once: head_dim × (value_dim + 1) for each token
    "linear": (heads(), {"normalizer": "linear"}, B * H * (N + M) * D * (V + 1)),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    tensors, options, expected = ATTENTION[name]
    assert count_multiply_adds(attnkit.attend, *tensors, **options) == expected


def test_blocks_compiled_code_and_expanded_parameters():
    dim, tokens = 12, 5
    block = attnkit.MultiHeadAttention(dim, H, num_kv_heads=1)
    width = dim + 2 * dim // H
    expected = B * (tokens * dim * (width + dim) + 2 * H * tokens**2 * dim // H)
    assert count_multiply_adds(block, torch.randn(B, tokens, dim)) == expected
    layer = torch.compile(nn.Linear(5, 7), backend="aot_eager")  # counted uncompiled
    assert count_multiply_adds(layer, torch.ones(3, 5)) == 3 * 5 * 7
    pool, x = attnkit.AttentionPool(8, 2).train(), torch.randn(3, 5, 8)
    assert count_multiply_adds(lambda: pool(x)) == count_multiply_adds(pool, x) > 0


def assert_edges_are_counted(score, backend):
    nodes, num_edges = 101, 53
    pairs = torch.randperm(nodes**2)[:num_edges]  # no edge twice
    edges = attnkit.Edges(torch.stack([pairs // nodes, pairs % nodes]), nodes)
    if score == "tanh":
        score = attnkit.Additive(torch.randn(H, D))
    options = {"mask": edges, "score": score, "backend": backend}
    count = count_multiply_adds(attnkit.attend, *heads(nodes, nodes), **options)
    # queries and keys are filled up to a multiple of 8 channels, which takes less time
    channels = D if isinstance(score, attnkit.Additive) else 8
    assert count == B * H * num_edges * (channels + V + 1)


@pytest.mark.parametrize("score", ["scaled_dot", "tanh"])
def test_edges(score):
    assert_edges_are_counted(score, "edges")


def test_edges_by_triton_are_counted_too(monkeypatch):
    """Triton's kernels are invisible to torch: what torch would run is counted."""
    from attnkit.core.kernels.edges import triton as edges_triton

    monkeypatch.setattr(edges_triton, "_runs_on", lambda device: True)
    monkeypatch.setattr(edges_triton, "solve", lambda kernel, problem: pytest.fail("Triton ran"))
    assert_edges_are_counted("scaled_dot", "edges_triton")


def test_window_is_less_than_everything():
    tokens, radius, dim = 2048, 16, 64  # with few channels larger blocks are quicker
    q, k, v = torch.randn(3, B, H, tokens, dim)
    full = count_multiply_adds(attnkit.attend, q, k, v)
    window = count_multiply_adds(attnkit.attend, q, k, v, mask=attnkit.Window(radius, radius))
    needed = B * H * tokens * (2 * radius + 1) * 2 * dim
    assert 0.9 * needed < window < 6 * needed
    assert full == B * H * tokens**2 * 2 * dim


def test_sparse_features():
    from attnkit.layers import SparseLinear

    dense = torch.randn(N, M).relu()
    sparse, nonzeros = dense.to_sparse_csr(), int((dense > 0).sum())
    assert 0 < nonzeros < N * M
    layer = SparseLinear(M, D)
    assert count_multiply_adds(layer, dense) == N * M * D
    assert count_multiply_adds(layer, sparse) == nonzeros * D
    weight = torch.randn(M, D)
    for product in (torch.mm, torch.sparse.mm):
        assert count_multiply_adds(product, sparse, weight) == nonzeros * D
        assert count_multiply_adds(product, sparse.to_sparse_coo(), weight) == nonzeros * D
    assert count_multiply_adds(torch.mv, sparse, weight[:, 0]) == nonzeros
    assert count_multiply_adds(torch.mm, weight.T, sparse.to_dense().T.to_sparse_csr()) == (
        nonzeros * D
    )


def test_leaves_the_module_as_it_was():
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(5)
            self.linear = nn.Linear(5, 7)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            assert not self.training
            self.calls += 1
            return self.linear(self.norm(x + torch.randn_like(x)))

    module = Draws()
    module.norm.eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    assert count_multiply_adds(module, torch.ones(3, 5)) == 3 * 5 * 7
    assert module.training
    assert not module.norm.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    with pytest.raises(RuntimeError):
        count_multiply_adds(module, torch.ones(3, 4))
    assert module.training
    assert torch.equal(module.calls, before["calls"])
