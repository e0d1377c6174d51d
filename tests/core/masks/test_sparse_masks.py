"""Every mask against its definition in plain Python, in each form that kernels read."""

from random import Random

import pytest
import torch
from random_masks import random_mask
from torch.utils import _pytree as pytree

import attnkit
from attnkit import Blocks, Causal, Dense, Edges, Packed, Padding, Window, Window2d
from attnkit.core.kernels import flex
from attnkit.core.kernels.flex import block_mask

CPU = torch.device("cpu")
BATCH, HEADS = 2, 3
GRID = torch.rand(3, 2, 3, generator=torch.Generator().manual_seed(0)) > 0.5
EDGES = torch.tensor([[0, 4, 4, 2, 12, 4], [1, 0, 6, 6, 3, 0]])


def sequence(index, lengths):
    """Which sequence a token is in, and where in it."""
    for i, length in enumerate(lengths):
        if index < length:
            return i, index
        index -= length
    raise AssertionError("beyond the last sequence")


def near(i, j, width, radius_h, radius_w):
    return abs(i // width - j // width) <= radius_h and abs(i % width - j % width) <= radius_w


def in_packed(i, j, lengths, key_lengths, rule):
    (a, local_i), (b, local_j) = sequence(i, lengths), sequence(j, key_lengths)
    return a == b and rule(local_i, local_j, key_lengths[a] - lengths[a])


# mask, queries, keys, and may query i of item b and head h look at key j?
CASES = {
    "window": (Window(2, 1), 7, 7, lambda b, h, i, j: -2 <= j - i <= 1),
    "window left": (Window(None, 1), 7, 7, lambda b, h, i, j: j <= i + 1),
    "window right": (Window(3, None), 7, 7, lambda b, h, i, j: j >= i - 3),
    "no limit": (Window(None, None), 5, 5, lambda b, h, i, j: True),
    "window top": (Window(2, 1, "top_left"), 5, 11, lambda b, h, i, j: -2 <= j - i <= 1),
    "window bottom": (Window(2, 1, "bottom_right"), 5, 11, lambda b, h, i, j: -2 <= j - i - 6 <= 1),
    "window & causal": (Window(3, 2) & Causal(), 7, 7, lambda b, h, i, j: -3 <= j - i <= 0),
    "grid": (Window2d(3, 5, 1, 2), 15, 15, lambda b, h, i, j: near(i, j, 5, 1, 2)),
    "grid, prefix": (
        Window2d(5, 3, 0, 1, num_prefix_tokens=2),
        17,
        17,
        lambda b, h, i, j: i < 2 or j < 2 or near(i - 2, j - 2, 3, 0, 1),
    ),
    "packed": (
        Packed([3, 0, 4]),
        7,
        7,
        lambda b, h, i, j: in_packed(i, j, [3, 0, 4], [3, 0, 4], lambda i, j, more: True),
    ),
    "packed & causal": (
        Packed([3, 0, 4], torch.tensor([5, 1, 7])) & Causal("bottom_right"),
        7,
        13,
        lambda b, h, i, j: in_packed(i, j, [3, 0, 4], [5, 1, 7], lambda i, j, m: j <= i + m),
    ),
    "packed & window": (
        Packed([3, 0, 4], [5, 1, 7]) & Window(1, 2, "top_left"),
        7,
        13,
        lambda b, h, i, j: in_packed(i, j, [3, 0, 4], [5, 1, 7], lambda i, j, m: -1 <= j - i <= 2),
    ),
    "blocks": (Blocks(GRID[0], (3, 5)), 5, 13, lambda b, h, i, j: GRID[0, i // 3, j // 5]),
    "blocks by head": (Blocks(GRID, (3, 5)), 5, 13, lambda b, h, i, j: GRID[h, i // 3, j // 5]),
    "edges": (
        Edges(EDGES, 7, 13),
        7,
        13,
        lambda b, h, i, j: (j, i) in [tuple(edge) for edge in EDGES.T.tolist()],
    ),
    "no edges": (Edges(EDGES[:, :0], 7, 13), 7, 13, lambda b, h, i, j: False),
    "or": (
        Window(1, 0) | Padding(torch.tensor([2, 0])),
        7,
        7,
        lambda b, h, i, j: i - 1 <= j <= i or j < (2, 0)[b],
    ),
    "not": (
        ~(Causal() & Padding(torch.tensor([5, 7]))),
        7,
        7,
        lambda b, h, i, j: j > i or j >= (5, 7)[b],
    ),
    "tensor | mask": (
        torch.eye(7, dtype=torch.bool) | Window(0, 1),
        7,
        7,
        lambda b, h, i, j: i <= j <= i + 1,
    ),
}  # fmt: skip


def written_out(name):
    _, num_queries, num_keys, rule = CASES[name]
    indices = (range(size) for size in (BATCH, HEADS, num_queries, num_keys))
    batches, heads, rows, columns = indices
    return torch.tensor(
        [
            [[[bool(rule(b, h, i, j)) for j in columns] for i in rows] for h in heads]
            for b in batches
        ]
    )


@pytest.mark.parametrize("name", CASES)
def test_dense_and_select_are_the_definition(name):
    mask, num_queries, num_keys, _ = CASES[name]
    expected = written_out(name)
    mask.check(BATCH, HEADS, num_queries, num_keys)
    dense = mask.dense(num_queries, num_keys, CPU)
    assert dense.dtype == torch.bool
    assert torch.equal(dense.expand(expected.shape), expected)
    items, heads, rows = torch.tensor([1]), torch.tensor([2, 0]), torch.tensor([4, 0, 2])
    selected = mask.select(items, heads, rows, num_queries, num_keys)
    assert torch.equal(selected.expand(1, 2, 3, num_keys), expected[items][:, heads][:, :, rows])


@pytest.mark.parametrize("name", [name for name in CASES if "edges" not in name])
def test_block_masks_are_the_definition(name):
    mask, num_queries, num_keys, _ = CASES[name]
    blocks = block_mask(mask, torch.empty(BATCH, HEADS, num_queries, 16), num_keys)
    where = (torch.arange(size) for size in (BATCH, HEADS, num_queries, num_keys))
    allowed = blocks.mask_mod(*torch.meshgrid(*where, indexing="ij"))
    assert torch.equal(allowed, written_out(name))


@pytest.mark.parametrize("name", ["packed & causal", "blocks by head"])
def test_flex_attention_reads_block_masks(name):
    """What FlexAttention computes from the lowered mask, which on the CPU has a forward only."""
    from torch.nn.attention.flex_attention import flex_attention

    mask, num_queries, num_keys, _ = CASES[name]
    expected = written_out(name)
    query = torch.randn(BATCH, HEADS, num_queries, 16)
    key, value = torch.randn(2, BATCH, HEADS, num_keys, 16).unbind()
    blocks = block_mask(mask, query, num_keys)
    output = flex_attention(query, key, value, block_mask=blocks)
    wanted = attnkit.attend(query, key, value, mask=expected, backend="reference")
    torch.testing.assert_close(output, wanted)


def as_dense(num_blocks, indices):
    """Which blocks are named, [items, heads, rows, columns]; more than there are here."""
    named = torch.arange(indices.shape[-1]) < num_blocks[..., None]
    dense = torch.zeros(*indices.shape[:-1], 6, dtype=torch.long)
    return dense.scatter_add_(-1, indices.long(), named.long()).bool()


@pytest.mark.parametrize("seed", range(12))
def test_block_masks_have_the_blocks_of_torch(seed, monkeypatch):
    """`create_block_mask` looks at each query and key; the blocks are equal, and so are theirs by
    keys, which the backward reads."""
    from torch.nn.attention.flex_attention import create_block_mask

    monkeypatch.setattr(flex, "BLOCKS_AT_ONCE", 7)
    monkeypatch.setattr(flex, "LISTED", 1)
    draw = Random(seed)
    for _ in range(3):
        sizes = 2, 3, draw.randint(100, 700), draw.randint(100, 700)
        mask = random_mask(draw, draw.randint(0, 3), sizes)
        if draw.random() < 0.2:
            mask = Window2d(draw.randint(5, 30), draw.randint(5, 30), 2, 3, draw.choice([0, 2]))
            sizes = 2, 3, mask.num_tokens, mask.num_tokens
        actual = block_mask(mask, torch.empty(*sizes[:3], 16), sizes[3])

        def allows(b, h, q, k, mask=mask, sizes=sizes):
            return mask.allows(b, h, q, k, *sizes[2:])

        told_apart = [n if part > 1 else None for n, part in zip(sizes, mask.leading, strict=False)]
        expected = create_block_mask(allows, *told_apart, *sizes[2:], device="cpu")
        for side in ("kv", "full_kv", "q", "full_q"):
            names = f"{side}_num_blocks", f"{side}_indices"
            ours, theirs = (
                as_dense(*(getattr(blocks, name) for name in names))
                for blocks in (actual, expected)
            )
            assert torch.equal(ours, theirs), (side, mask)
        assert actual.seq_lengths == expected.seq_lengths
        assert actual.BLOCK_SIZE == expected.BLOCK_SIZE


def test_block_masks_are_made_for_many_tokens():
    """At 100,000 tokens queries × keys are 10 GB of booleans; at a million, blocks × blocks are 244
    MB of numbers for each of four tables."""
    for tokens, mask, most in (
        (100_000, Window(300, 300) & Causal(), 4),
        (100_000, Packed([1000] * 100), 17),
        (10**6, Window(300, 300), 7),
        (10**6, Window(20_000, 0), 158),
    ):
        blocks = block_mask(mask, torch.empty(1, 1, tokens, 1), tokens)
        assert (blocks.kv_num_blocks + blocks.full_kv_num_blocks).max() <= most
        assert blocks.kv_indices.shape == blocks.full_kv_indices.shape  # as one kernel takes it
        assert max(blocks.kv_indices.shape[-1], blocks.q_indices.shape[-1]) <= 256


def test_block_masks_leave_empty_blocks_out():
    query = torch.empty(1, 1, 1024, 16)
    blocks = block_mask(Window(100, 100), query, 1024)
    expected = (torch.arange(8)[:, None] - torch.arange(8)).abs() <= 1
    assert torch.equal(blocks.to_dense()[0, 0].bool(), expected)
    assert block_mask(Window(100, 100), query, 1024) is blocks
    both = [block_mask(Window(100, None) & Causal(), query, 1024) for _ in range(2)]
    assert both[0] is both[1]
    lengths = torch.tensor([512, 512])
    halves = block_mask(Packed(lengths), query, 1024).to_dense()[0, 0].bool()
    assert torch.equal(halves, (torch.arange(8)[:, None] // 4 == torch.arange(8) // 4))
    lengths.copy_(torch.tensor([1024, 0]))  # what it says is not kept
    assert block_mask(Packed(lengths), query, 1024).to_dense().all()


@pytest.mark.parametrize("name", CASES)
def test_masks_are_pytrees_and_move(name):
    mask, num_queries, num_keys, _ = CASES[name]
    leaves, structure = pytree.tree_flatten(mask)
    assert all(isinstance(leaf, torch.Tensor | int) for leaf in leaves)
    rebuilt = pytree.tree_unflatten(leaves, structure)
    sizes = num_queries, num_keys, CPU
    assert torch.equal(rebuilt.dense(*sizes), mask.dense(*sizes))
    moved = [leaf for leaf in pytree.tree_leaves(mask.to("meta")) if isinstance(leaf, torch.Tensor)]
    assert all(tensor.is_meta for tensor in moved)


def test_a_selection_builds_no_other_rows():
    masks = [Window(3, 3), Window2d(1000, 1000, 3, 3), Packed([999_983, 17])]
    masks += [masks[0] & masks[2], ~masks[1] | masks[2], Edges(EDGES, 1_000_000)]
    masks += [Blocks(torch.ones(1000, 1000, dtype=torch.bool), 1000)]
    for mask in masks:  # a whole matrix would be 1 TB
        zero = torch.tensor([0])
        row = mask.select(zero, zero, torch.tensor([3]), 1_000_000, 1_000_000)
        assert row.shape == (1, 1, 1, 1_000_000)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Window(-1, 2), ValueError, "left: expected an integer ≥ 0 or None, got -1"),
        (lambda: Window(1, 0.5), ValueError, "right: expected an integer ≥ 0 or None, got 0.5"),
        (lambda: Window(1, 1, "left"), ValueError, "align: expected 'top_left'.*Window"),
        (lambda: Window(1, 1).check(1, 1, 3, 5), ValueError, r"Window\(\) with 3 queries and 5"),
        (lambda: Window2d(0, 3, 1, 1), ValueError, "height: expected an integer ≥ 1, got 0"),
        (lambda: Window2d(3, 3, 1, 1).check(1, 1, 10, 10), ValueError, "for 9 tokens.*got 10"),
        (lambda: Packed(torch.ones(2)), TypeError, "lengths: expected integers"),
        (lambda: Packed(torch.ones(2, 2).int()), ValueError, r"expected the shape \[sequences\]"),
        (lambda: Packed([1, 2], [3]), ValueError, "key_lengths: 1 sequences, but lengths has 2"),
        (lambda: Packed([1, 2]).check(1, 1, 5, 5), ValueError, "sum to 3, but there are 5 queries"),
        (lambda: Packed([7, -2]).check(1, 1, 5, 5), ValueError, "negative length, -2"),
        (lambda: Packed([3], [2]).check(1, 1, 3, 3), ValueError, "sum to 2, but there are 3 keys"),
        (
            lambda: (Packed([1, 4], [2, 3]) & Causal()).check(1, 1, 5, 5),
            ValueError,
            "1 queries and 2 keys is ambiguous",
        ),
        (lambda: Blocks(torch.ones(2, 2), 3), TypeError, "grid: expected booleans"),
        (lambda: Blocks(torch.ones(2).bool(), 3), ValueError, "grid: expected .query blocks"),
        (lambda: Blocks(GRID, 0), ValueError, "block_size: expected at least 1"),
        (lambda: Blocks(GRID, 3).check(1, 2, 5, 9), ValueError, r"expected \[2, 3\] or \[2, 2"),
        (lambda: Blocks(GRID, 3).check(1, 3, 7, 9), ValueError, r"expected \[3, 3\]"),
        (lambda: Edges(EDGES.float(), 7), TypeError, "edge_index: expected integers"),
        (lambda: Edges(EDGES.T, 7), ValueError, r"expected the shape \[2, edges\], got \[6, 2\]"),
        (lambda: Edges(EDGES, 7), IndexError, "source nodes go from 0 to 12, expected 0 to 6"),
        (lambda: Edges(EDGES - 1, 7, 13), IndexError, "source nodes go from -1 to 11"),
        (lambda: Edges(EDGES, 13).check(1, 1, 7, 13), ValueError, "Edges has 13 targets"),
        (lambda: Window(1, 1) | torch.ones(2, 2), TypeError, "expected a boolean tensor"),
        (lambda: (~Dense(GRID)).check(1, 3, 5, 7), ValueError, "does not broadcast"),
    ],
)  # fmt: skip
def test_wrong_masks_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
