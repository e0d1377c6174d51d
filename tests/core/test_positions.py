"""Positions, each by the property that defines it."""

import pytest
import timm.layers
import torch

from attnkit.core.positions import Rotary2d, resize_positions, sincos_2d

GRID = (3, 5)


def test_sincos_products_depend_on_differences_only():
    table = sincos_2d((7, 7), 24).double().view(7, 7, 24)
    for shift in ((2, 0), (0, 3), (1, 2)):
        moved = table[shift[0] :, shift[1] :], table[: 7 - shift[0], : 7 - shift[1]]
        products = (moved[0] * moved[1]).sum(-1)
        torch.testing.assert_close(products, products[0, 0].expand_as(products))
    assert len({tuple(row.tolist()) for row in table.flatten(0, 1)}) == 49


def test_sincos_against_its_formula():
    table = sincos_2d(GRID, 8).view(*GRID, 8)
    row, column, frequencies = 2, 4, torch.tensor([1.0, 10000**-0.5])
    expected = torch.cat(
        [f(position * frequencies) for position in (column, row) for f in (torch.sin, torch.cos)]
    )
    torch.testing.assert_close(table[row, column], expected)


def rotated_scores(rotary, grid, prefix):
    """The products of one query and one key put at every pair of tokens."""
    tokens = prefix + grid[0] * grid[1]
    query = torch.randn(8, dtype=torch.float64).expand(1, 1, tokens, 8)
    key = torch.randn(8, dtype=torch.float64).expand(1, 1, tokens, 8)
    query, key = rotary(query, key)
    return (query @ key.transpose(-2, -1))[0, 0, prefix:, prefix:].view(*grid, *grid)


def test_rotary_scores_depend_on_differences_only():
    rotary = Rotary2d(8, GRID, num_prefix_tokens=2, dtype=torch.float64)
    scores = rotated_scores(rotary, GRID, prefix=2)
    by_difference = {}
    for q_row, q_column, k_row, k_column in torch.cartesian_prod(
        *(torch.arange(size) for size in (*GRID, *GRID))
    ).tolist():
        difference = (q_row - k_row, q_column - k_column)
        score = scores[q_row, q_column, k_row, k_column]
        torch.testing.assert_close(score, by_difference.setdefault(difference, score))
    values = torch.stack(list(by_difference.values()))
    assert len(values) == 45
    assert len(values.unique()) == 45


def test_rotary_leaves_prefix_tokens_and_lengths_alone():
    rotary = Rotary2d(8, GRID, num_prefix_tokens=2)
    query, key = torch.randn(2, 3, 11, 17, 8)
    turned_query, turned_key = rotary(query, key)
    assert torch.equal(turned_query[:, :, :2], query[:, :, :2])
    torch.testing.assert_close(turned_key.norm(dim=-1), key.norm(dim=-1))
    assert not torch.allclose(turned_key[:, :, 3:], key[:, :, 3:])


def test_rotary_of_some_patches_and_of_the_first_queries():
    rotary = Rotary2d(8, GRID, num_prefix_tokens=1)
    query, key = torch.randn(2, 3, 2, 16, 8)
    full_query, full_key = rotary(query, key)
    kept = torch.tensor([[14, 0, 3], [2, 1, 7], [5, 5, 6]])
    rows = torch.cat([torch.zeros(3, 1, dtype=torch.long), kept + 1], dim=1)
    item = torch.arange(3)[:, None]
    some = rotary.rotation(kept)(
        *(t.transpose(1, 2)[item, rows].transpose(1, 2) for t in (query, key))
    )
    for actual, full in zip(some, (full_query, full_key), strict=True):
        torch.testing.assert_close(actual, full.transpose(1, 2)[item, rows].transpose(1, 2))
    first, all_keys = rotary.rotation().first_queries(4)(query[:, :, :4], key)
    assert torch.equal(first, full_query[:, :, :4])
    assert torch.equal(all_keys, full_key)


def test_resize_equals_timm():
    positions = torch.randn(1, 15, 11)
    for grid in ((6, 10), (2, 3), (7, 5)):
        expected = timm.layers.resample_abs_pos_embed(
            positions, new_size=grid, old_size=GRID, num_prefix_tokens=0
        )
        torch.testing.assert_close(resize_positions(positions, GRID, grid), expected)
    assert resize_positions(positions, GRID, GRID) is positions


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sincos_2d(GRID, 6), "dim: 6 is not a multiple of 4"),
        (lambda: Rotary2d(6, GRID), "head_dim: 6 is not a multiple of 4"),
        (lambda: resize_positions(torch.randn(1, 14, 4), GRID, (2, 2)), "do not fill old_grid 3"),
        (lambda: Rotary2d(8, GRID)(*torch.randn(2, 1, 1, 14, 8)), "14 tokens, but the rotation"),
    ],
)
def test_wrong_sizes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
