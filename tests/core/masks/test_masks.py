"""What each mask means, written out; how masks combine, move and are refused."""

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from attnkit.core.attend import attend
from attnkit.core.masks.base import And, Dense, as_mask
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.grids import Blocks, Window2d
from attnkit.core.masks.sequences import Causal, Packed, Padding, Window

CPU = torch.device("cpu")


def rows(mask, num_queries, num_keys):
    dense = mask.dense(num_queries, num_keys, CPU)
    assert dense.dtype == torch.bool
    assert dense.ndim == 4
    return ["".join("x" if may else "." for may in row) for row in dense[0, 0]]


def test_causal_alignments():
    assert rows(Causal("top_left"), 3, 5) == ["x....", "xx...", "xxx.."]
    assert rows(Causal("bottom_right"), 3, 5) == ["xxx..", "xxxx.", "xxxxx"]
    assert rows(Causal("bottom_right"), 3, 2) == ["..", "x.", "xx"]
    assert rows(Causal(), 2, 2) == ["x.", "xx"]


def test_padding_by_lengths_and_by_booleans():
    by_lengths = Padding(torch.tensor([2, 0, 3]))
    by_booleans = Padding(torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.bool))
    expected = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)[:, None, None]
    for mask in (by_lengths, by_booleans):
        assert torch.equal(mask.dense(7, 3, CPU), expected)


def test_and_is_the_intersection_and_stays_flat():
    some = torch.rand(3, 1, 5, 5) > 0.5
    mask = Causal() & (Padding(torch.tensor([5, 3, 1])) & some)
    expected = torch.ones(5, 5).tril().bool() & some
    expected[1, :, :, 3:] = False
    expected[2, :, :, 1:] = False
    assert torch.equal(mask.dense(5, 5, CPU), expected)
    assert [type(part) for part in mask.masks] == [Causal, Padding, Dense]
    assert torch.equal((some & Causal()).dense(5, 5, CPU), (Causal() & some).dense(5, 5, CPU))


@pytest.mark.parametrize(
    "mask",
    [
        Causal("bottom_right"),
        Padding(torch.tensor([7, 3])),
        Dense(torch.rand(2, 3, 5, 7) > 0.5),
        Dense(torch.rand(5, 1) > 0.5),
        Causal("top_left") & Dense(torch.rand(3, 1, 7) > 0.5),
    ],
    ids=lambda mask: type(mask).__name__,
)
@pytest.mark.parametrize("items", [[1], [1, 0]], ids=str)
def test_select_is_the_dense_mask_of_some_items_heads_and_rows(mask, items):
    items, heads, rows = torch.tensor(items), torch.tensor([2, 0]), torch.tensor([4, 0, 2])
    full = mask.dense(5, 7, CPU).expand(2, 3, 5, 7)
    selected = mask.select(items, heads, rows, 5, 7).expand(len(items), 2, 3, 7)
    assert torch.equal(selected, full[items][:, heads][:, :, rows])


def test_masks_are_pytrees_and_move():
    mask = Causal("bottom_right") & Padding(torch.tensor([2, 3]))
    leaves, structure = pytree.tree_flatten(mask)
    assert [leaf.tolist() for leaf in leaves] == [[2, 3]]
    rebuilt = pytree.tree_unflatten(leaves, structure)
    assert rebuilt.masks[0] == Causal("bottom_right")
    moved = mask.to("meta")
    assert isinstance(moved, And)
    assert moved.masks[1].lengths.device.type == "meta"


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
    expected = rows(Padding([2]), 2, 4), rows(Packed([1, 3]), 4, 4)
    for dtype in (np.uint8, np.int16, np.uint16, np.uint32, np.uint64):
        lengths, packed = np.array([2], dtype), torch.from_numpy(np.array([1, 3], dtype))
        assert (rows(Padding(lengths), 2, 4), rows(Packed(packed), 4, 4)) == expected
        attend(*[torch.ones(1, 1, 4, 4)] * 3, mask=Padding(lengths) & Packed(packed))
    assert Edges([[], []], 3).num_edges == 0


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
        (lambda: Padding(torch.tensor([1.0])), TypeError, "lengths: expected integers"),
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
        (lambda: Causal() & torch.zeros(2, 2), TypeError, "expected a boolean tensor"),
    ],
)
def test_wrong_masks_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
