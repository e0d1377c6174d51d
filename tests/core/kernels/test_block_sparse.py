"""Any mask by its plan: against the definition in float64, linear, and where it is chosen."""

from functools import cache, partial
from random import Random

import pytest
import torch
from random_masks import random_grid, random_mask, random_sizes
from support import TOLERANCES, assert_equal, with_gradients
from torch.utils._python_dispatch import TorchDispatchMode

import attnkit
from attnkit import Causal, Packed, Padding, Window, Window2d, attend
from attnkit.core.kernels import block_sparse, block_steps
from attnkit.core.kernels.choose import UnsupportedError

CPU = torch.device("cpu")
BATCH, HEADS, KV_HEADS = 2, 6, 3
SOME = torch.rand(1, HEADS, 331, 331, generator=torch.Generator().manual_seed(0)) > 0.7
LENGTHS = [101, 0, 199, 31]

# mask, queries, keys; with blocks of 64 queries and tiles of 8 × 8 these have blocks
# inside, at both ends and cut short
CASES = {
    "line": (Window(11, 7), 331, 331),
    "own token only": (Window(0, 0), 331, 331),
    "wider than all": (Window(401, 409), 331, 331),
    "far": (Window(89, 3), 331, 331),
    "one-sided, cut": (Window(13, None) & Causal(), 331, 331),
    "fewer keys": (Window(11, 7, "top_left"), 331, 211),
    "fewer keys, at the end": (Window(11, 7, "bottom_right"), 331, 211),
    "more keys": (Window(11, 7, "bottom_right"), 211, 331),
    "padding": (Window(11, 3) & Padding(torch.tensor([331, 53])), 331, 331),
    "in sequences": (Window(11, 3) & Packed(LENGTHS), 331, 331),
    "dense": (Window(5, 3) & SOME, 331, 331),
    "grid": (Window2d(19, 23, 3, 2), 437, 437),
    "grid, prefix": (Window2d(23, 11, 1, 2, num_prefix_tokens=3), 256, 256),
    "a row": (Window2d(1, 331, 0, 7), 331, 331),
    "a column": (Window2d(331, 1, 7, 0), 331, 331),
    "small grid": (Window2d(5, 7, 13, 11, num_prefix_tokens=1), 36, 36),
    "grid & dense": (
        Window2d(19, 17, 2, 1, num_prefix_tokens=8) & SOME & Padding(torch.tensor([331, 2])),
        331,
        331,
    ),
    "packed": (Packed(LENGTHS), 331, 331),
    "packed & causal": (Packed(LENGTHS) & Causal(), 331, 331),
    "alike": (Packed([61, 60, 59, 0, 61, 61, 29]), 331, 331),
    "alike & causal": (Packed([61, 60, 59, 0, 61, 61, 29]) & Causal(), 331, 331),
    "alike, cross": (Packed([66, 65, 66, 67, 67], [3, 5, 0, 5, 6]), 331, 19),
    "packed cross": (Packed(LENGTHS, [3, 5, 0, 11]), 331, 19),
    "packed cross & window": (
        Packed(LENGTHS, [3, 5, 31, 11]) & Window(7, 5, "bottom_right"),
        331,
        50,
    ),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Blocks of several sizes, with several runs of keys, in threads, at the sizes of tests."""
    sizes = {"LARGE": 64, "SMALL": 16, "LONG": 32, "MOST_KEYS": 96, "STEP": 2**10}
    for name, size in sizes.items():
        monkeypatch.setattr(block_steps, name, size)
    monkeypatch.setattr(block_sparse, "TASKS_PAY", 0)
    monkeypatch.setattr(block_sparse, "MOST_WIDTH", 32)


def make(num_queries, num_keys, dtype, head_dim=7, value_dim=5):
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (BATCH, HEADS, num_queries, head_dim),
        (BATCH, KV_HEADS, num_keys, head_dim),
        (BATCH, KV_HEADS, num_keys, value_dim),
    ]
    # laid out as by a projection: tokens before heads; numbers that every dtype holds
    numbers = [torch.randn(b, n, h, d, generator=generator) * 16 for b, h, n, d in shapes]
    return [(n.round() / 16).transpose(1, 2).to(dtype).requires_grad_() for n in numbers]


@cache
def definition(name):
    """The bias of a case, what is allowed, and the result with its gradients."""
    mask, num_queries, num_keys = CASES[name]
    bias = None
    if name in ("line", "grid, prefix", "packed & causal"):
        bias = torch.randn(1, HEADS, num_queries, num_keys, generator=torch.manual_seed(1))
    allowed = mask.dense(num_queries, num_keys, CPU)
    exact = make(num_queries, num_keys, torch.float64)
    return bias, allowed, with_gradients(exact, mask=allowed, bias=bias, backend="reference")


# of the four dtypes each mask has one in every run, and all with the slow tests
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.slow] if (i + j) % 4 else [])
        for i, name in enumerate(CASES)
        for j, dtype in enumerate(TOLERANCES)
    ],
    ids=str,
)
def test_kernel_equals_the_reference(name, dtype):
    mask, num_queries, num_keys = CASES[name]
    tensors = make(num_queries, num_keys, dtype)
    bias, allowed, expected = definition(name)
    plain = with_gradients(tensors, mask=allowed, bias=bias, backend="math")
    with attnkit.record_backends() as record:
        recorded = attend(*tensors, mask=mask, bias=bias, backend="block_sparse")
    assert record.total()["block_sparse"] == 1
    actual = with_gradients(tensors, mask=mask, bias=bias, backend="block_sparse")
    assert_equal(recorded, expected[0], plain[0])  # which looks into operators, so without threads
    for results in zip(actual, expected, plain, strict=True):
        assert results[0].dtype == dtype
        assert_equal(*results)
    dead = ~allowed.expand(BATCH, HEADS, -1, -1).any(-1)
    assert (actual[0][dead] == 0).all()
    assert (actual[1][dead] == 0).all()


def random_attention(draw):
    """An attention of random sizes, heads, layout, mask and bias, in float64."""
    batch, num_heads, num_queries, num_keys = sizes = random_sizes(draw)
    mask = random_mask(draw, 3, sizes)
    if draw.random() < 0.1:
        mask = random_grid(draw)
        num_queries = num_keys = mask.num_tokens
        if draw.random() < 0.5:
            mask = mask & Padding(torch.tensor([draw.randint(0, num_keys), 0]))
    num_key_heads = draw.choice([n for n in (1, 2, 3, 4) if num_heads % n == 0])
    dim, value_dim = draw.choice([3, 5, 8]), draw.choice([3, 8])
    shapes = (
        (batch, num_queries, num_heads, dim),
        (batch, num_keys, num_key_heads, dim),
        (batch, num_keys, num_key_heads, value_dim),
    )
    generator = torch.Generator().manual_seed(draw.randint(0, 2**31))
    tensors = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors = [tensor.transpose(1, 2) for tensor in tensors]
    if draw.random() < 0.5:
        tensors = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in tensors]
    bias = None
    if draw.random() < 0.3:
        full = batch, num_heads, num_queries, num_keys
        some = [draw.choice([1, size]) for size in full]
        bias = torch.randn(some, generator=generator, dtype=torch.float64)
    return [tensor.requires_grad_() for tensor in tensors], {"mask": mask, "bias": bias}


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 100))]
)
def test_random_compositions_equal_the_reference(seed, monkeypatch):
    draw = Random(seed)
    for _ in range(32):
        tensors, options = random_attention(draw)
        sizes = draw.choice([(16, 4, 8, 32), (8, 8, 4, 12), (32, 8, 16, 24), (256, 64, 256, 1024)])
        for name, size in zip(("LARGE", "SMALL", "LONG", "MOST_KEYS"), sizes, strict=True):
            monkeypatch.setattr(block_steps, name, size)
        actual, expected = (
            with_gradients(tensors, **options, backend=backend)
            for backend in ("block_sparse", "reference")
        )
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["line", "far", "fewer keys, at the end", "in sequences", "grid", "alike & causal"]
)
def test_threads_change_no_bit(name, dtype, monkeypatch):
    """Nor does it that short attention is computed without threads of our own, but for rounding."""
    mask, num_queries, num_keys = CASES[name]
    tensors, results = make(num_queries, num_keys, dtype), []
    before = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        results.append(with_gradients(tensors, mask=mask, backend="block_sparse"))
    torch.set_num_threads(before)
    assert all(map(torch.equal, *results))
    monkeypatch.setattr(block_sparse, "TASKS_PAY", 2**62)
    alone = with_gradients(tensors, mask=mask, backend="block_sparse")
    tolerance = {"atol": 0.05, "rtol": 0.05} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(alone, results[0], **tolerance)


def test_cases_have_dead_rows():
    dead = {
        name for name, (mask, *sizes) in CASES.items() if not mask.dense(*sizes, CPU).any(-1).all()
    }
    assert dead >= {"fewer keys", "padding", "dense", "grid & dense", "packed cross"}


class LargestOutput(TorchDispatchMode):
    """The most elements in a storage that an operator returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor):
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.largest = max(self.largest, size)
        return output


@pytest.mark.parametrize(
    ("backend", "mask", "tokens"),
    [
        ("block_sparse", Window(16, 16), 4096),
        ("block_sparse", Window(16, 16) & Padding(torch.tensor([4001])), 4096),
        ("block_sparse", Window2d(64, 64, 2, 2, num_prefix_tokens=1), 4097),
        ("block_sparse", Packed([61] * 67), 4087),
        ("block_sparse", Causal() & ~Window(300, 300) & Packed([512] * 8), 4096),
        ("flash", Window(16, 16), 4096),
    ],
    ids=["line", "padding", "grid", "packed", "composition", "control"],
)
def test_memory_is_linear(backend, mask, tokens, monkeypatch):
    monkeypatch.undo()  # at the sizes of users, which are fewer operators to look into
    tensors = [torch.randn(1, 2, tokens, 8, requires_grad=True) for _ in range(3)]
    with LargestOutput() as mode:
        output = attend(*tensors, mask=mask, backend=backend)
        torch.autograd.grad(output.sum(), tensors)
    # query or key, or the term of a chunk of blocks
    bound = 16 * tensors[0].numel()
    assert bound < tokens**2 / 8
    assert (mode.largest < bound) == (backend != "flash")


def test_auto_takes_them_where_they_pay():
    def chosen(tokens, mask, **options):
        tensors = [torch.empty(1, 4, tokens, 64)] * 3
        return attnkit.explain_backends(*tensors, mask=mask, **options).chosen

    assert chosen(4096, Window(64, 64)) == "block_sparse"
    assert chosen(4096, Window(4000, 4000)) == "flash"
    assert chosen(64, Window(3, 3)) == "flash"
    assert chosen(4096, Window(64, None)) == "block_sparse"
    assert chosen(4096, Causal()) == "flash"
    assert chosen(4096, Window(64, None) & Causal()) == "block_sparse"
    assert chosen(4096, Window(64, 64), dropout_p=0.1) == "blockwise"
    assert chosen(4096, Window2d(64, 64, 3, 3)) == "block_sparse"
    assert chosen(49, Window2d(7, 7, 1, 1)) == "flash"
    assert chosen(4096, Packed([2048, 2048])) == "block_sparse"
    assert chosen(6, Packed([1, 2, 3])) == "flash"


def test_a_window_that_forgot_the_class_token_says_so():
    tensors = [torch.zeros(1, 2, 26, 4)] * 3
    with pytest.raises(ValueError, match=r"got 26 queries .*: num_prefix_tokens=1$"):
        attend(*tensors, mask=Window2d(5, 5, 1, 1))
    with pytest.raises(ValueError, match=r"and 26 keys$"):
        attend(*tensors, mask=Window2d(5, 6, 1, 1))


def test_refusals():
    tensors = make(11, 11, torch.float32)
    learned = torch.zeros(11, 11, requires_grad=True)
    for options, message in [
        ({"mask": Window(1, 1), "dropout_p": 0.1}, "no dropout"),
        ({"mask": Window(1, 1), "bias": learned}, "no gradient for the bias"),
        ({"mask": Window(1, 1), "scale": -1.0}, "needs a positive scale"),
    ]:
        with pytest.raises(UnsupportedError, match=message):
            attend(*tensors, backend="block_sparse", **options)
    by_window = partial(attend, mask=Window(1, 1), backend="block_sparse")
    with pytest.raises(UnsupportedError, match=r"does not support torch\.func"):
        torch.func.grad(lambda query: by_window(query, *tensors[1:]).sum())(tensors[0])
    with pytest.raises(UnsupportedError, match="needs tensors on cuda"):
        attend(*tensors, backend="flex", mask=Window(1, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_cuda_equals_the_reference(name):
    mask, num_queries, num_keys = CASES[name]
    mask = mask.to("cuda")
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [t.detach().cuda().requires_grad_() for t in make(num_queries, num_keys, dtype)]
        allowed = mask.dense(num_queries, num_keys, torch.device("cuda"))
        exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
        expected = with_gradients(exact, mask=allowed, backend="reference")
        plain = with_gradients(tensors, mask=allowed, backend="math")
        reasons = attnkit.explain_backends(*tensors, mask=mask).reasons
        assert not reasons["flex"]
        for backend in (name for name in ("flex", "varlen") if not reasons[name]):
            actual = with_gradients(tensors, mask=mask, backend=backend)
            for results in zip(actual, expected, plain, strict=True):
                assert_equal(*results)
