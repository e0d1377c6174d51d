"""Every mask against its definition in plain Python, in each form that kernels read; how masks are
made, move and are refused."""

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import attnkit
from attnkit import Blocks, Causal, Dense, Edges, Packed, Padding, Window, Window2d, attend
from attnkit.core.kernels.flex import block_mask
from attnkit.core.masks.base import as_mask

CPU = torch.device("cpu")
BATCH, HEADS = 2, 3
GRID = torch.rand(3, 2, 3, generator=torch.Generator().manual_seed(0)) > 0.5
SEEN = torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(1)) > 0.5
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
    "causal top": (Causal("top_left"), 5, 7, lambda b, h, i, j: j <= i),
    "causal bottom": (Causal("bottom_right"), 5, 7, lambda b, h, i, j: j <= i + 2),
    "causal, fewer keys": (Causal("bottom_right"), 7, 5, lambda b, h, i, j: j <= i - 2),
    "causal": (Causal(), 5, 5, lambda b, h, i, j: j <= i),
    "padding": (Padding(torch.tensor([3, 0])), 5, 7, lambda b, h, i, j: j < (3, 0)[b]),
    "padding, booleans": (
        Padding(torch.tensor([[True, False, True], [False, False, False]])),
        5,
        3,
        lambda b, h, i, j: b == 0 and j != 1,
    ),
    "dense": (Dense(SEEN), 5, 7, lambda b, h, i, j: SEEN[b, h, i, j]),
    "dense, one row": (
        Causal("top_left") & SEEN[:, :1, :1],
        5,
        7,
        lambda b, h, i, j: j <= i and SEEN[b, 0, 0, j],
    ),
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


INTEGERS = [np.int64, np.int32, np.uint8, lambda size: torch.tensor(size)]


@pytest.mark.parametrize("integer", INTEGERS)
def test_integers_of_numpy_and_torch_are_integers(integer):
    assert Window(integer(1), integer(2)) == Window(1, 2)
    assert Window(None, integer(2)) == Window(None, 2)
    sizes = 3, 4, 1, 2, 1
    assert Window2d(*map(integer, sizes)) == Window2d(*sizes)
    grid = torch.ones(2, 2).tril().bool()
    for size in (3, (3, 2)):
        given = tuple(map(integer, size)) if isinstance(size, tuple) else integer(size)
        assert Blocks(grid, given).sizes == Blocks(grid, size).sizes


def test_numbers_of_every_kind():
    expected = Padding([2]).dense(2, 4, CPU), Packed([1, 3]).dense(4, 4, CPU)
    for dtype in (np.uint8, np.int16, np.uint16, np.uint32, np.uint64):
        lengths, packed = np.array([2], dtype), torch.from_numpy(np.array([1, 3], dtype))
        assert torch.equal(Padding(lengths).dense(2, 4, CPU), expected[0])
        assert torch.equal(Packed(packed).dense(4, 4, CPU), expected[1])
        attend(*[torch.ones(1, 1, 4, 4)] * 3, mask=Padding(lengths) & Packed(packed))
    assert Edges([[], []], 3).num_edges == 0


def test_and_stays_flat():
    mask = Causal() & (Padding(torch.tensor([5, 3, 1])) & torch.ones(5, 5).bool())
    assert [type(part) for part in mask.masks] == [Causal, Padding, Dense]


@pytest.mark.parametrize("form", [torch.tensor, np.array, list, tuple])
def test_masks_take_lists_and_arrays(form):
    edges, grid, allowed = [[0, 1, 2], [2, 0, 1]], [[True, False], [True, True]], [[True, False]]
    for mask, expected in (
        (Padding(form([2, 0, 3])), Padding(torch.tensor([2, 0, 3]))),
        (Padding(form(grid)), Padding(torch.tensor(grid))),
        (Packed(form([1, 2]), form([2, 1])), Packed(torch.tensor([1, 2]), torch.tensor([2, 1]))),
        (Blocks(form(grid), 2), Blocks(torch.tensor(grid), 2)),
        (Edges(form(edges), 3), Edges(torch.tensor(edges), 3)),
        (Dense(form(allowed)), Dense(torch.tensor(allowed))),
    ):
        for found, right in zip(*map(pytree.tree_leaves, (mask, expected)), strict=True):
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(right))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Window(1.0, 2), ValueError, "left: expected an integer ≥ 0 or None, got 1.0"),
        (lambda: Window(1, -1), ValueError, "right: expected an integer ≥ 0 or None, got -1"),
        (lambda: Window2d("3", 3, 1, 1), ValueError, "height: expected an integer ≥ 1, got '3'"),
        (
            lambda: Blocks(torch.ones(1, 1).bool(), 3.0),
            ValueError,
            "block_size: expected at least 1, one",
        ),
        (lambda: Padding("63"), TypeError, "lengths: expected a tensor or a list of numbers"),
        (lambda: Padding([1.0]), TypeError, "lengths: expected integers"),
        (lambda: Packed([[1], [2, 3]]), TypeError, "lengths: expected a tensor or a list"),
        (lambda: Causal("left"), ValueError, "align: expected 'top_left' or 'bottom_right'"),
        (lambda: Padding(torch.ones(2, 3).int()), ValueError, r"expected the shape \[batch\]"),
        (lambda: Padding(torch.ones(3).bool()), ValueError, r"boolean Padding is \[batch, keys\]"),
        (lambda: Dense(torch.zeros(2, 2)), TypeError, "True = may look.*additive terms go into"),
        (lambda: as_mask([True]), TypeError, "got list"),
        (
            lambda: torch.vmap(lambda n: attend(*[torch.ones(1, 6, 4)] * 3, mask=Packed(n)))(
                torch.tensor([[2, 4], [3, 3]])
            ),
            ValueError,
            "torch.vmap over the lengths of Packed",
        ),
        *[
            (lambda make=make, given=given: make(given), TypeError, "expected a tensor or a list")
            for make in (
                Padding,
                Packed,
                lambda given: Packed([1], given or {}),
                lambda given: Edges(given, 6),
                lambda given: Blocks(given, 2),
                Dense,
            )
            for given in (6, None, {1, 2}, object())
        ],
        *[
            (lambda given=given: Edges([[0], [1]], *given), TypeError, "expected the number of")
            for given in ((None,), ({},), ((6, None),), (6, [6]), (6.0,), (torch.tensor(6),))
        ],
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
