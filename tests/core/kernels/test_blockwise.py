"""Attention in blocks: what it holds, and that its gradients are those of the whole."""

import subprocess
import sys
from functools import partial
from random import Random

import pytest
import torch
from random_masks import random_mask, random_sizes
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import attnkit
from attnkit import Additive, Causal, Dense, Gaussian, Packed, Padding, ScaledDot, Window, attend
from attnkit.core.kernels import recompute
from attnkit.core.scores.kinds import Score

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM = 5, 6, 2, 7, 11, 3

MASKS = {
    "none": None,
    "and": Causal("top_left") & Padding(torch.tensor([11, 0, 3, 7, 1])),
    "items": Dense(torch.arange(BATCH * QUERIES * KEYS).view(BATCH, 1, QUERIES, KEYS) % 3 > 0),
    "heads": Dense(torch.arange(HEADS * KEYS).view(HEADS, 1, KEYS) % 4 > 0),
}


@pytest.fixture(params=[40, 200, 2000], ids=lambda size: f"{size} scores")
def block_size(request, monkeypatch):
    """Rows of one item, an item, and several items in a block."""
    monkeypatch.setitem(recompute.BLOCK_SCORES, "cpu", request.param)


def make(dtype=torch.float64, heads=KV_HEADS):
    shapes = (HEADS, QUERIES), (heads, KEYS), (heads, KEYS)
    return [torch.randn(BATCH, *shape, DIM, dtype=dtype, requires_grad=True) for shape in shapes]


class Own(Score):
    """A score with a module in it, whose parameters no field of the score holds."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "layer", torch.nn.Linear(DIM, DIM).double())

    def uncapped(self, query, key):
        return -torch.cdist(self.layer(query), key, p=1)


@pytest.mark.parametrize("kind", ["vector", "own"])
def test_tensors_of_the_score_get_their_gradients(kind, block_size):
    query, key, value = make()
    if kind == "own":
        score = Own()
        parameters = list(score.layer.parameters())
    else:
        parameters = [torch.randn(HEADS, DIM, dtype=torch.float64, requires_grad=True)]
        score = Additive(*parameters)
    actual, expected = (
        torch.autograd.grad(
            attend(query, key, value, score=score, backend=backend).square().sum(),
            [query, key, value, *parameters],
        )
        for backend in ("blockwise", "reference")
    )
    torch.testing.assert_close(actual, expected)


def test_only_what_needs_a_gradient_has_one(block_size):
    query, key, value = make()
    output = attend(query.detach(), key, value.detach(), backend="blockwise")
    (actual,) = torch.autograd.grad(output.sum(), key)
    output = attend(query.detach(), key, value.detach(), backend="reference")
    torch.testing.assert_close(actual, torch.autograd.grad(output.sum(), key)[0])


@pytest.mark.parametrize("create_graph", [False, True])
def test_dropout_is_drawn_again_and_leaves_the_generator_alone(create_graph, block_size):
    query, key, value = make(heads=HEADS)
    torch.manual_seed(5)
    output = attend(query, key, value, dropout_p=0.4, backend="blockwise")
    after = torch.get_rng_state()
    ones = torch.ones_like(output)
    (gradient,) = torch.autograd.grad(output, value, ones, create_graph=create_graph)
    assert torch.equal(torch.get_rng_state(), after)
    # the output is linear in the values, by the same weights
    torch.testing.assert_close((gradient * value).sum(), output.sum())
    again = attend(query, key, value, dropout_p=0.4, backend="blockwise")
    assert not torch.allclose(again, output)


def test_in_forward_mode(block_size):
    query, key, value = (tensor.detach() for tensor in make())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, torch.randn_like(query))
        actual, expected = (
            forward_ad.unpack_dual(attend(dual, key, value, backend=backend)).tangent
            for backend in ("blockwise", "reference")
        )
    torch.testing.assert_close(actual, expected)


MEASURE = """
import resource, sys, torch
import attnkit
from attnkit import Causal, Padding, attend
from attnkit.core.kernels import recompute
torch.set_num_threads(1)
recompute.BLOCK_SCORES["cpu"] = 2**19
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
    1 if sys.platform == "darwin" else 1024)

def step(batch):
    lengths = torch.arange(batch) % 512 + 1
    mask = Causal() & Padding(lengths) if sys.argv[1] == "and" else Causal()
    tensors = [torch.randn(batch, 4, 512, 32, requires_grad=True) for _ in "qkv"]
    before = peak()
    attend(*tensors, mask=mask, dropout_p=0.1, backend="blockwise").sum().backward()
    return (peak() - before) / (4 * tensors[0].nbytes)

step(4)
print(step(128))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "and"])
def test_memory_grows_as_output_and_gradients_do(mask):
    """The peak of a process, which also sees memory that is free and cannot be used."""
    done = subprocess.run([sys.executable, "-c", MEASURE, mask], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 1.5


def test_a_block_asks_for_the_mask_of_its_own_items():
    sizes = []

    class Counted(Padding):
        def allows(self, *where):
            allowed = super().allows(*where)
            sizes.append(allowed.numel())
            return allowed

    tensors = [torch.randn(64, 2, 128, 3, requires_grad=True) for _ in "qkv"]
    mask = Causal() & Counted(torch.arange(64) % 128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recompute.BLOCK_SCORES, "cpu", 2 * 128 * 32)
        patch.setattr(recompute, "KEPT", 0)
        attnkit.attend(*tensors, mask=mask, backend="blockwise").sum().backward()
    assert len(sizes) == 2 * 64 * 4
    assert max(sizes) == 128


@pytest.mark.parametrize(("kept", "again"), [(0, 4), (2, 2), (4, 0)])
def test_the_last_blocks_are_not_computed_again(kept, again, monkeypatch):
    """But for a second backward, or within a checkpoint, which computes all again once more."""
    calls = []

    def counted(score, query, key):
        calls.append(len(query))
        return score.definition(query, key)

    monkeypatch.setattr(ScaledDot, "scores", counted)
    monkeypatch.setitem(recompute.BLOCK_SCORES, "cpu", 16 * 64)
    monkeypatch.setattr(recompute, "KEPT", kept)
    tensors = [torch.randn(1, 1, 64, 3, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    attention = partial(attend, dropout_p=0.3, backend="blockwise")
    output = attention(*tensors)
    first, second = (
        torch.autograd.grad(output.sum(), tensors, retain_graph=True) for _ in range(2)
    )
    torch.testing.assert_close(first, second)
    assert len(calls) == 4 + again + 4
    calls.clear()
    checkpoint(attention, *tensors, use_reentrant=False).sum().backward()
    assert len(calls) == 4 + 4 + 4


@pytest.mark.parametrize("seed", range(6))
def test_only_keys_that_may_be_seen_are_read(seed, monkeypatch):
    """Random compositions against the definition, with what flash cannot compute."""
    draw = Random(seed)
    for _ in range(6):
        monkeypatch.setattr(recompute, "ROWS", draw.choice([4, 8]))
        monkeypatch.setattr(recompute, "LEAST_KEYS", 1)
        monkeypatch.setitem(recompute.BLOCK_SCORES, "cpu", draw.choice([50, 500, 2**21]))
        batch, num_heads, num_queries, num_keys = sizes = random_sizes(draw, 29)
        key_heads = draw.choice([n for n in (1, 2, 3, 4) if num_heads % n == 0])
        shapes = (num_heads, num_queries, 5), (key_heads, num_keys, 5), (key_heads, num_keys, 7)
        tensors = [torch.randn(batch, *shape, dtype=torch.float64) for shape in shapes]
        vector = torch.randn(num_heads, 5, dtype=torch.float64)
        bias = torch.randn([draw.choice([1, n]) for n in sizes], dtype=torch.float64)
        kind = draw.choice(["softcap", "additive", "gaussian"])
        options = {"mask": random_mask(draw, 3, sizes)}
        leaves = [tensor.requires_grad_() for tensor in (*tensors, bias, vector)]

        def run(backend, kind=kind, options=options, leaves=leaves):
            scores = {
                "softcap": ScaledDot(softcap=2.0),
                "additive": Additive(leaves[4]),
                "gaussian": Gaussian(1.3),
            }
            output = attend(
                *leaves[:3], bias=leaves[3], score=scores[kind], backend=backend, **options
            )
            wanted = leaves if kind == "additive" else leaves[:4]
            first = torch.autograd.grad(output.square().sum(), wanted, create_graph=True)
            second = torch.autograd.grad(first[0].square().sum(), wanted[:3])
            return output, *first, *second

        expected = run("reference")
        torch.testing.assert_close(run("blockwise"), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mask", [Window(9, 9), Packed([31, 66]), Causal() & Window(7, 0)], ids=str)
def test_dropout_of_what_is_read_is_drawn_again(mask, monkeypatch):
    """The output is linear in the values: its sum is that of values times their gradients, if the
    backward drops what the forward did."""
    monkeypatch.setattr(recompute, "ROWS", 16)
    monkeypatch.setattr(recompute, "LEAST_KEYS", 1)
    query, key, value = torch.randn(3, 2, 2, 97, 5, dtype=torch.float64).unbind()
    value.requires_grad_()
    output = attend(query, key, value, mask=mask, dropout_p=0.5, backend="blockwise")
    (gradient,) = torch.autograd.grad(output.sum(), value)
    torch.testing.assert_close((gradient * value).sum(), output.sum())
    assert output.ne(attend(query, key, value, mask=mask, backend="blockwise")).any()


def test_a_window_computes_few_scores(monkeypatch):
    computed = []
    of_block = recompute._read

    def counting(block, *rest):
        read, allowed = of_block(block, *rest)
        computed.append(read.query.shape[2] * read.key.shape[2])
        return read, allowed

    monkeypatch.setattr(recompute, "_read", counting)
    tensors = torch.randn(3, 1, 1, 4096, 4).unbind()
    for mask, share in ((Window(64, 64), 0.1), (Packed([256] * 16), 1 / 16), (None, 1.0)):
        computed.clear()
        attend(*tensors, mask=mask, score=ScaledDot(softcap=3.0))
        assert sum(computed) in (0, pytest.approx(share * 4096**2, rel=0.25))
        assert mask is None or computed
