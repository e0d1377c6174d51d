"""Sinusoidal positions, each by the property that defines it."""

import pytest
import timm.layers
import torch
from torch_geometric.nn import PositionalEncoding

from attnkit import sincos_1d, sincos_2d

GRID = (3, 5)


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("shift", [1, 4])
def test_a_step_in_1d_is_the_same_rotation_everywhere(shift):
    table = sincos_1d(13, 14)
    bands = 10000.0 ** (-torch.arange(7) / 7)
    cos, sin = torch.diag((shift * bands).cos()), torch.diag((shift * bands).sin())
    step = torch.cat([torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)])
    torch.testing.assert_close(step @ step.T, torch.eye(14))
    torch.testing.assert_close(table[:-shift] @ step.T, table[shift:])


def test_products_in_1d_depend_on_differences_only():
    table = sincos_1d(13, 14)
    products = table @ table.T
    for shift in range(13):
        diagonal = products.diagonal(shift)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert len(products[0].unique()) == 13
    # the same row at the start of the table, and no table longer than it must be
    assert torch.equal(sincos_1d(5, 14), table[:5])


def test_1d_against_its_formula():
    """Vaswani et al. 2017, section 3.5: channels 2i and 2i + 1, here all sines first."""
    row, i = sincos_1d(7, 6)[5], torch.arange(3)
    angles = 5 / 10000 ** (2 * i / 6)
    torch.testing.assert_close(row, torch.cat([angles.sin(), angles.cos()]))


def test_products_in_2d_depend_on_differences_only():
    table = sincos_2d((7, 7), 24).view(7, 7, 24)
    for shift in ((2, 0), (0, 3), (1, 2)):
        moved = table[shift[0] :, shift[1] :], table[: 7 - shift[0], : 7 - shift[1]]
        products = (moved[0] * moved[1]).sum(-1)
        torch.testing.assert_close(products, products[0, 0].expand_as(products))
    assert len({tuple(row.tolist()) for row in table.flatten(0, 1)}) == 49


def test_2d_against_its_formula_and_1d():
    table = sincos_2d(GRID, 8).view(*GRID, 8)
    row, column, frequencies = 2, 4, torch.tensor([1.0, 10000**-0.5])
    expected = torch.cat(
        [f(position * frequencies) for position in (column, row) for f in (torch.sin, torch.cos)]
    )
    torch.testing.assert_close(table[row, column], expected)
    torch.testing.assert_close(table[0, :, :4], sincos_1d(5, 4))
    torch.testing.assert_close(table[:, 0, 4:], sincos_1d(3, 4))


@pytest.mark.parametrize("temperature", [10000.0, 100.0])
def test_equals_timm_but_for_the_order_of_channels(temperature):
    options = {"temperature": temperature, "dtype": torch.float64}
    theirs = timm.layers.build_sincos2d_pos_embed(GRID, 12, **options)
    y_sin, x_sin, y_cos, x_cos = theirs.split(3, dim=1)
    expected = torch.cat([x_sin, x_cos, y_sin, y_cos], dim=1)
    ours = sincos_2d(GRID, 12, temperature=temperature)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)  # theirs goes through float32
    line = timm.layers.build_sincos2d_pos_embed((7, 1), 12, **options)
    expected = torch.cat([line[:, :3], line[:, 6:9]], dim=1)
    ours = sincos_1d(7, 6, temperature=temperature)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


def test_pyg_has_other_frequencies_in_the_same_layout():
    """It divides by dim / 2 - 1: our temperature ** (7 / 6) over 7 bands is its over 6."""
    theirs = PositionalEncoding(14)(torch.arange(11.0))
    ours = sincos_1d(11, 14, temperature=10000.0 ** (7 / 6))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)  # theirs begins in float32


def test_tables_come_in_the_default_dtype():
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        assert sincos_1d(3, 4).dtype == sincos_2d(GRID, 4).dtype == dtype


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sincos_1d(3, 7), "dim: 7 is not a multiple of 2"),
        (lambda: sincos_1d(0, 6), "num_positions: expected at least 1, got 0"),
        (lambda: sincos_1d(3, 0), "dim: expected at least 1, got 0"),
        (lambda: sincos_2d(GRID, 6), "dim: 6 is not a multiple of 4"),
        (lambda: sincos_2d((3, 0), 8), "columns: expected at least 1, got 0"),
    ],
)
def test_wrong_sizes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
