"""`attnkit.exact`: an item's output and gradients have the same bits whatever is beside it."""

import asyncio
import hashlib
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnkit
from attnkit import Causal, Edges, Packed, Padding, UnsupportedError, Window
from attnkit.core.decode_step import attention_step
from attnkit.core.kernels.base import by_operators

THREADS = 1, 2, 3, 4
LENGTHS = 1, 2, 7, 31, 63, 64, 65, 100, 128, 191, 200, 257, 300
HEAD_DIMS = 8, 16, 33, 64
DTYPES = torch.float32, torch.float32, torch.float64, torch.bfloat16


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def results(tensors, **options):
    """The output of query, key and value, and their gradients for the fourth tensor."""
    *inputs, towards = tensors
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    with attnkit.exact():
        output = attnkit.attend(*inputs, **options)
    return [output.detach(), *torch.autograd.grad(output, inputs, towards)]


def are_same(ones, others):
    return all(
        one.shape == other.shape
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for one, other in zip(ones, others, strict=True)
    )


def laid_anyhow(draw, tensor):
    """The same numbers as layers or views may hand them over."""
    kind = draw.choice(["in order", "heads side by side", 1, 3, 8])
    if kind == "in order":
        return tensor.clone()
    if kind == "heads side by side":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    memory = torch.empty(tensor.numel() + kind, dtype=tensor.dtype)
    return memory[kind:].view(tensor.shape).copy_(tensor)


class Case:
    """Sequences, each alone: query, key, value and the gradient of its output."""

    def __init__(self, seed, lengths=LENGTHS, key_lengths=None):
        self.draw = draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.dim = draw.choice(DTYPES), draw.choice(HEAD_DIMS)
        self.value_dim = draw.choice([self.dim, self.dim, 20])
        self.num_kv_heads = draw.choice([1, 2])
        self.num_heads = self.num_kv_heads * draw.choice([1, 2, 3])
        num = draw.choice([1, 2, 3, 5, 9])
        self.lengths = draw.choices(lengths, k=num)
        self.key_lengths = draw.choices(key_lengths, k=num) if key_lengths else self.lengths
        self.sequences = [
            self.drawn(1, *sizes) for sizes in zip(self.lengths, self.key_lengths, strict=True)
        ]

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def drawn(self, batch, num_queries, num_keys):
        return [
            self.normal(batch, self.num_heads, num_queries, self.dim),
            self.normal(batch, self.num_kv_heads, num_keys, self.dim),
            self.normal(batch, self.num_kv_heads, num_keys, self.value_dim),
            self.normal(batch, self.num_heads, num_queries, self.value_dim),
        ]

    def results(self, tensors, **options):
        """Those of other threads and other strides each time."""
        torch.set_num_threads(self.draw.choice(THREADS))
        return results([laid_anyhow(self.draw, tensor) for tensor in tensors], **options)

    def alone(self, **options):
        return [self.results(sequence, **options) for sequence in self.sequences]

    def packed(self, mask=None):
        """What each has in one row with the others."""
        packing = Packed(torch.tensor(self.lengths), torch.tensor(self.key_lengths))
        mask = packing if mask is None else packing & mask
        joined = [torch.cat(tensors, 2) for tensors in zip(*self.sequences, strict=True)]
        output, of_query, of_key, of_value = self.results(joined, mask=mask)
        parts = [tensor.split(self.lengths, 2) for tensor in (output, of_query)]
        parts += [tensor.split(self.key_lengths, 2) for tensor in (of_key, of_value)]
        return list(zip(*parts, strict=True))

    def padded(self, mask=None):
        """What each has in a batch, with anything for padding."""
        longest = max(self.lengths) + self.draw.choice([0, 0, 5])
        whole = self.drawn(len(self.lengths), longest, longest)
        whole[3].zero_()  # nobody reads what stands at padding
        at_the_end = self.draw.random() < 0.7
        real = torch.zeros(len(self.lengths), longest, dtype=torch.bool)
        places = []
        for item, (length, tensors) in enumerate(zip(self.lengths, self.sequences, strict=True)):
            first = 0 if at_the_end else self.draw.randint(0, longest - length)
            places.append(slice(first, first + length))
            real[item, places[-1]] = True
            for padded, tensor in zip(whole, tensors, strict=True):
                padded[item, :, places[-1]] = tensor[0]
        padding = Padding(torch.tensor(self.lengths) if at_the_end else real)
        found = self.results(whole, mask=padding if mask is None else mask & padding)
        return [
            [tensor[item : item + 1, :, place] for tensor in found]
            for item, place in enumerate(places)
        ]

    def among_others(self, **options):
        """What the first has at some place of a batch."""
        size, (sequence, *_) = self.draw.randint(2, 9), self.sequences
        place = self.draw.randrange(size)
        whole = self.drawn(size, sequence[0].shape[2], sequence[1].shape[2])
        for tensors, tensor in zip(whole, sequence, strict=True):
            tensors[place] = tensor[0]
        found = self.results(whole, **options)
        return [tensor[place : place + 1] for tensor in found]


@pytest.mark.parametrize("seed", range(30))
def test_a_sequence_alone_among_others_packed_and_padded(seed):
    case = Case(seed)
    mask = case.draw.choice(
        [None, None, Causal(), Causal(), Window(40, 9), Window(30, 30) & Causal()]
    )
    alone = case.alone(mask=mask)
    assert are_same(case.among_others(mask=mask), alone[0]), "among others"
    for name in ("packed", "padded"):
        for one, other in zip(getattr(case, name)(mask), alone, strict=True):
            assert are_same(one, other), name


@pytest.mark.parametrize("mask", [None, Causal(), Window(100, 0)])
def test_long_sequences(mask):
    case = Case(3, lengths=(1000, 1023, 1300))
    case.lengths, case.sequences = case.lengths[:2], case.sequences[:2]
    case.key_lengths = case.lengths
    alone = case.alone(mask=mask)
    for found in (case.packed(mask), case.padded(mask)):
        assert all(map(are_same, found, alone))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mask", [None, Causal("bottom_right"), Causal("top_left")])
def test_other_numbers_of_keys_than_of_queries(seed, mask):
    # so many keys that several steps are joined
    case = Case(seed, lengths=(1, 7, 50, 65), key_lengths=(3, 80, 1300, 2500))
    alone = case.alone(mask=mask)
    assert are_same(case.among_others(mask=mask), alone[0])
    assert all(map(are_same, case.packed(mask), alone))


def test_steps_of_the_same_shape_whose_masks_differ():
    case, mask = Case(0), Window(100, None, "bottom_right")
    case.lengths, case.key_lengths = [300, 280], [300, 300]
    case.sequences = [case.drawn(1, 300, 300), case.drawn(1, 280, 300)]
    assert all(map(are_same, case.packed(mask), case.alone(mask=mask)))


@pytest.mark.parametrize("lengths", [(70, 3, 41), "booleans"])
def test_padded_keys_of_cross_attention(lengths):
    case = Case(5, lengths=(29,), key_lengths=(90,))
    whole = case.drawn(3, 29, 90)
    places = [slice(0, length) for length in (70, 3, 41)]
    padding = Padding(torch.tensor([70, 3, 41]))
    if lengths == "booleans":
        places = [slice(20, 90), slice(40, 43), slice(0, 41)]
        rows = [torch.arange(90).ge(p.start) & torch.arange(90).lt(p.stop) for p in places]
        padding = Padding(torch.stack(rows))
    output, of_query, of_key, of_value = case.results(whole, mask=padding)
    for item, place in enumerate(places):
        query, key, value, towards = (tensor[item : item + 1] for tensor in whole)
        alone = case.results([query, key[:, :, place], value[:, :, place], towards])
        found = [tensor[item : item + 1] for tensor in (output, of_query, of_key, of_value)]
        assert are_same([*found[:2], *(tensor[:, :, place] for tensor in found[2:])], alone)


def test_an_item_without_keys_gives_zero():
    tensors = Case(0).drawn(2, 12, 12)
    for mask in (Padding(torch.tensor([0, 12])), Packed(torch.tensor([0, 12])) & Causal()):
        output, *gradients = results(tensors, mask=mask)
        assert output.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in gradients)
    output, *gradients = results(tensors, mask=Padding(torch.tensor([0, 12])))
    assert not any(tensor[0].any() for tensor in (output, *gradients))


def is_seen(num):
    return torch.rand(num, num, generator=torch.Generator().manual_seed(0)) < 0.3


MASKS = {
    "grid": lambda num: {"mask": attnkit.Window2d(num // 12, 12, 2, 3)},
    "blocks": lambda num: {"mask": attnkit.Blocks(is_seen(num // 12), 12)},
    "booleans": lambda num: {"mask": is_seen(num)},
    "window or booleans": lambda num: {"mask": Window(20, 20) | is_seen(num)},
    "not": lambda num: {"mask": ~Window(20, 20)},
    "bias": lambda num: {"bias": torch.where(is_seen(num), 0.5, -torch.inf), "mask": Causal()},
    "factor": lambda num: {"scale": 0.3},
    "factors": lambda num: {"score": attnkit.ScaledDot(scale=torch.tensor([0.3]))},
    "dot": lambda num: {"score": "dot"},
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_all_items(name):
    case = Case(2, lengths=(96, 360))
    options = MASKS[name](case.lengths[0])
    (alone,) = [case.results(sequence, **options) for sequence in case.sequences[:1]]
    assert are_same(case.among_others(**options), alone)


@pytest.mark.parametrize("mask", [None, Causal(), Padding(torch.tensor([50, 70])), Window(9, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_they_are_the_values_of_the_definition(mask, dtype):
    case = Case(1)
    case.dtype = dtype
    tensors = case.drawn(2, 70, 70)
    exact = [tensor.double() for tensor in tensors]
    inputs = [tensor.requires_grad_() for tensor in exact[:3]]
    output = attnkit.attend(*inputs, mask=mask, backend="reference")
    expected = [output, *torch.autograd.grad(output, inputs, exact[3])]
    for one, other in zip(results(tensors, mask=mask), expected, strict=True):
        assert one.dtype == dtype
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2}[dtype]
        torch.testing.assert_close(one.double(), other, atol=tolerance, rtol=tolerance)


def digest():
    """A hash of what several cases give."""
    found = hashlib.sha256()
    for seed in range(12):
        case = Case(seed)
        case.results = results  # in as many threads as the process has
        for one in [*case.alone(mask=Causal()), *case.packed(Window(20, 5)), *case.padded()]:
            for tensor in one:
                found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.slow
def test_in_a_process_of_other_threads():
    command = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    command += f"import {Path(__file__).stem} as here; print(here.digest())"
    variables = os.environ | {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}  # this has 1
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, env=variables
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest()


@pytest.mark.parametrize("seed", [0, 4, 5])  # of one and more heads, with both scores and dtypes
def test_graphs(seed):
    """A graph alone and beside others: each node has its own bits."""
    pytest.importorskip("numba")
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, dim = draw.choice([1, 2, 5]), draw.choice([1, 8, 20, 33, 64])
    dtype, value_dim = draw.choice([torch.float32, torch.bfloat16]), draw.choice([dim, 12])
    sizes = [draw.choice([3, 50, 700]), *draw.choices([1, 30, 999], k=draw.choice([1, 2, 5]))]
    graphs = []
    for size in sizes:
        num_edges = size * draw.choice([0, 1, 7, 20])
        targets = size * torch.rand(num_edges, generator=generator) ** draw.choice([1, 6])
        sources = torch.randint(size, (num_edges,), generator=generator)
        graphs.append(torch.stack([sources, targets.long().clamp(max=size - 1)]))
    order = draw.sample(range(len(sizes)), len(sizes))
    starts = {i: sum(sizes[j] for j in order[:place]) for place, i in enumerate(order)}
    joined = torch.cat([graphs[i] + starts[i] for i in order], 1)
    if draw.random() < 0.5:  # the edges of all, those of each in their order
        ranks = [torch.rand(graphs[i].shape[1], generator=generator).sort()[0] for i in order]
        joined = joined[:, torch.cat(ranks).argsort(stable=True)]
    shapes = [(1, heads, sum(sizes), size) for size in (dim, dim, value_dim, value_dim)]
    whole = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    options = {}
    if draw.random() < 0.5:
        vector = torch.randn(heads, dim, generator=generator).to(dtype)
        score = attnkit.Additive(vector, activation="leaky_relu", negative_slope=0.2)
        options["score"] = score
    own = slice(starts[0], starts[0] + sizes[0])
    torch.set_num_threads(draw.choice(THREADS))
    mask = Edges(graphs[0], sizes[0])
    alone = results([tensor[:, :, own] for tensor in whole], mask=mask, **options)
    torch.set_num_threads(draw.choice(THREADS))
    found = results(whole, mask=Edges(joined, sum(sizes)), **options)
    assert are_same([tensor[:, :, own] for tensor in found], alone)


class Thrice(nn.Module):
    """A projection without a matrix product, whose bits depend on nothing else."""

    def forward(self, tokens):
        return torch.cat([tokens, 0.5 * tokens, -tokens], -1)


def test_a_layer_whose_projections_are_equal():
    block = attnkit.MultiHeadAttention(66, 2)
    block.in_proj, block.out_proj = Thrice(), nn.Identity()
    tokens = torch.randn(4, 130, 66)
    towards = torch.randn_like(tokens)

    def both(chosen, threads):
        torch.set_num_threads(threads)
        given = tokens[chosen].detach().requires_grad_()
        with attnkit.exact():
            output = block(given, mask=Causal())
        return [output.detach(), *torch.autograd.grad(output, given, towards[chosen])]

    whole = both(slice(None), 2)
    for item in range(4):
        own = slice(item, item + 1)
        assert are_same([tensor[own] for tensor in whole], both(own, 1))


def test_a_step_of_decoding():
    block = attnkit.MultiHeadAttention(66, 2).eval()
    block.in_proj, block.out_proj = Thrice(), nn.Identity()
    tokens = torch.randn(5, 40, 66)

    @torch.no_grad()
    def last(items):
        with attnkit.exact(), attnkit.record_backends() as record:
            cache = block.new_cache(len(items), 40, device="cpu", dtype=torch.float32)
            steps = [attention_step(block, t, cache) for t in items.split(1, dim=1)]
        assert set(record.total()) == {"block_sparse"}
        return torch.cat(steps, 1)

    assert are_same([last(tokens)[3:4]], [last(tokens[3:4])])


def test_recorded_and_under_autocast():
    case = Case(2, lengths=(100,))
    alone = case.results(case.sequences[0])
    with attnkit.record_backends() as record:
        assert are_same(case.among_others(), alone)
    assert record.total() == {"block_sparse": 1}
    with torch.autocast("cpu", torch.bfloat16):
        alone = case.results(case.sequences[0])
        assert are_same(case.among_others(), alone)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_in_the_block(use_reentrant):
    case = Case(2, lengths=(100,))
    *inputs, towards = case.drawn(3, 100, 100)

    def both(chosen, threads):
        torch.set_num_threads(threads)
        given = [tensor[chosen].detach().requires_grad_() for tensor in inputs]
        with attnkit.exact():
            output = checkpoint(attnkit.attend, *given, use_reentrant=use_reentrant)
            output.backward(towards[chosen])
        return [output.detach(), *(tensor.grad for tensor in given)]

    whole, own = both(slice(None), 2), slice(1, 2)
    assert are_same([tensor[own] for tensor in whole], both(own, 1))
    alone = results([tensor[own] for tensor in (*inputs, towards)])
    assert are_same(both(own, 3), alone)


def test_vectors_of_one_length_are_one_layout():
    """A tensor of one token, or one head, may have any strides there."""
    query, key, value, towards = Case(0).drawn(3, 1, 70)
    strange = query[:1].as_strided(query[:1].shape, (7, query.shape[3], 3, 1))
    ones = results([query[:1], key[:1], value[:1], towards[:1]])
    others = results([strange, key[:1], value[:1], towards[:1]])
    assert are_same(ones[:1], others[:1])


TENSORS = [torch.randn(2, 2, 70, 16) for _ in range(3)]
LEARNED = torch.zeros(70, 70, requires_grad=True)
REFUSED = {
    "dropout": ({"dropout_p": 0.1}, "dropout for the whole batch.*dropout_p=0.1; give 0"),
    "cosine": ({"score": "cosine"}, "no exact score but .*got Cosine"),
    "softcap": ({"score": attnkit.ScaledDot(softcap=9.0)}, "softcap"),
    "linear": ({"normalizer": "linear"}, "needs the normalizer Softmax, got Linear"),
    "learned bias": ({"bias": LEARNED}, "no gradient for the bias"),
    "two": ({"mask": Packed(torch.tensor([70])) & Padding(torch.tensor([9, 9]))}, "got several"),
    "beside": ({"mask": Padding(torch.tensor([9, 9])) & is_seen(70)}, "Window beside .*got Dense"),
    "or": ({"mask": Window(3, 3) | Packed(torch.tensor([30, 40]))}, "by themselves or in '&'"),
    "items": ({"mask": torch.ones(2, 1, 70, 70, dtype=torch.bool)}, "the same for all items"),
    "holes": ({"mask": Padding(torch.arange(140).view(2, 70) % 3 > 0)}, "beside each other"),
    "edges": ({"mask": Edges(torch.tensor([[0], [1]]), 70) & Causal()}, "node of Edges by itself"),
    "sink": ({"sink": torch.zeros(2)}, "no exact sink"),
    **{
        name: ({"backend": name}, f"backend='{name}' cannot .*threads, inside attnkit.exact")
        for name in ("flash", "math", "blockwise", "reference", "efficient", "varlen")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused(name):
    options, message = REFUSED[name]
    with attnkit.exact(), pytest.raises(UnsupportedError, match=message):
        attnkit.attend(*TENSORS, **options)


def test_over_edges_what_cannot_be_exact_is_refused():
    pytest.importorskip("numba")
    query, key, value = TENSORS
    edges = Edges(torch.randint(70, (2, 300)), 70)
    features = attnkit.EdgeFeatures(torch.randn(300, 3), key_weight=torch.randn(2, 16, 3))
    wide = torch.cat([query] * 3, 1)
    for tensors, options, message in (
        (TENSORS, {"edge_features": features}, "no exact edge features"),
        (TENSORS, {"backend": "edges"}, "depend on the batch or on threads"),
        (TENSORS, {"sink": torch.zeros(2)}, "no exact sink"),
        ([wide, key, value], {}, "no exact grouped heads"),
        ([tensor.double() for tensor in TENSORS], {}, "float64"),
    ):
        with attnkit.exact(), pytest.raises(UnsupportedError, match=message):
            attnkit.attend(*tensors, mask=edges, **options)
    with attnkit.exact(), by_operators(), pytest.raises(UnsupportedError, match="is counted by"):
        attnkit.attend(*TENSORS, mask=edges)


def test_other_devices_and_alignments_are_refused():
    tensors = [tensor.to("meta") for tensor in TENSORS]
    with attnkit.exact(), pytest.raises(UnsupportedError, match="needs tensors on cpu"):
        attnkit.attend(*tensors)
    query, key, value, _ = Case(4).drawn(2, 5, 9)
    mask = Causal("top_left") & Padding(torch.tensor([4, 5]))
    with attnkit.exact(), pytest.raises(UnsupportedError, match="as many queries as keys"):
        attnkit.attend(query, key, value, mask=mask)


def chosen():
    return attnkit.explain_backends(*TENSORS).chosen


def test_blocks_in_blocks_and_other_threads():
    assert chosen() == "flash"
    found = []
    with attnkit.exact():
        with attnkit.exact():
            assert chosen() == "block_sparse"
        assert chosen() == "block_sparse"
        thread = threading.Thread(target=lambda: found.append(chosen()))
        thread.start()
        thread.join()

        async def task():
            found.append(await asyncio.to_thread(chosen))

        asyncio.run(task())
    assert found == ["flash", "block_sparse"]
    assert chosen() == "flash"


def test_a_block_that_raised_is_left():
    with pytest.raises(ValueError, match="of the user"), attnkit.exact():
        raise ValueError("of the user")
    assert chosen() == "flash"


def test_compiled_code_runs_uncompiled_in_the_block():
    compiled = torch.compile(lambda query: attnkit.attend(query, query, query), backend="eager")
    query = TENSORS[0]
    outside = compiled(query)
    with attnkit.exact():
        assert are_same([compiled(query)], [attnkit.attend(query, query, query)])
    assert torch.equal(compiled(query), outside)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_code_cannot_open_a_block(fullgraph):
    def inside(query):
        with attnkit.exact():
            return attnkit.attend(query, query, query)

    with pytest.raises(Exception, match=r"attnkit\.exact: cannot|torch\.compile region"):
        torch.compile(inside, backend="eager", fullgraph=fullgraph)(TENSORS[0])


def test_an_exported_program_is_refused():
    class Attend(nn.Module):
        def forward(self, query):
            return attnkit.attend(query, query, query)

    with attnkit.exact(), pytest.raises(Exception, match="cannot be exact in a compiled program"):
        torch.export.export(Attend(), (TENSORS[0],))
