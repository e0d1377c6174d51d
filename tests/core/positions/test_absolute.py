"""Positions that are added: sinusoidal tables, learned ones, and what resampling keeps."""

import copy

import pytest
import timm.layers
import torch
from torch.nn.functional import embedding
from torch_geometric.nn import PositionalEncoding

from attnkit import (
    FactorizedPositions2d,
    LearnedPositions1d,
    LearnedPositions2d,
    sincos_1d,
    sincos_2d,
)
from attnkit.core.positions.absolute import resize_positions

GRID = (3, 5)
MAKE = {
    "1d": lambda **options: LearnedPositions1d(15, 7, **options),
    "2d": lambda **options: LearnedPositions2d(GRID, 7, **options),
    "factorized": lambda **options: FactorizedPositions2d(GRID, 7, **options),
}


@pytest.fixture
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_float64")
def test_sinusoids_against_their_formulas():
    """Vaswani et al. 2017, section 3.5: channels 2i and 2i + 1, here all sines first."""
    angles = 5 / 10000 ** (2 * torch.arange(3) / 6)
    table = sincos_1d(7, 6)
    torch.testing.assert_close(table[5], torch.cat([angles.sin(), angles.cos()]))
    assert torch.equal(sincos_1d(5, 6), table[:5])
    table = sincos_2d(GRID, 8).view(*GRID, 8)
    row, column, frequencies = 2, 4, torch.tensor([1.0, 10000**-0.5])
    expected = torch.cat(
        [f(position * frequencies) for position in (column, row) for f in (torch.sin, torch.cos)]
    )
    torch.testing.assert_close(table[row, column], expected)
    torch.testing.assert_close(table[0, :, :4], sincos_1d(5, 4))
    torch.testing.assert_close(table[:, 0, 4:], sincos_1d(3, 4))


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("temperature", [10000.0, 100.0])
def test_sinusoids_are_timms_but_for_the_order_of_channels(temperature):
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


@pytest.mark.usefixtures("_float64")
def test_pyg_has_other_frequencies_in_the_same_layout():
    """It divides by dim / 2 - 1: our temperature ** (7 / 6) over 7 bands is its over 6."""
    theirs = PositionalEncoding(14)(torch.arange(11.0))
    ours = sincos_1d(11, 14, temperature=10000.0 ** (7 / 6))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)  # theirs begins in float32


@pytest.mark.usefixtures("_float64")
def test_sinusoids_come_in_the_default_dtype():
    assert sincos_1d(3, 4).dtype == sincos_2d(GRID, 4).dtype == torch.float64
    torch.set_default_dtype(torch.float32)
    assert sincos_1d(3, 4).dtype == sincos_2d(GRID, 4).dtype == torch.float32


def test_1d_adds_the_row_of_each_position():
    positions = LearnedPositions1d(11, 7)
    tokens = torch.randn(3, 5, 7)
    for start in (0, 6):
        rows = torch.arange(start, start + 5)
        expected = tokens + embedding(rows, positions.table)
        assert torch.equal(positions(tokens, start=start), expected)


@pytest.mark.parametrize("kind", ["2d", "factorized"])
def test_2d_adds_to_patches_and_leaves_the_prefix_alone(kind):
    positions = MAKE[kind](num_prefix_tokens=2)
    tokens = torch.randn(3, 2 + 15, 7)
    added = positions(tokens)
    assert torch.equal(added[:, :2], tokens[:, :2])
    if kind == "2d":
        position = positions.table[2 * 5 + 4]
    else:
        position = positions.row_table[2] + positions.column_table[4]
    assert torch.equal(added[:, 2 + 2 * 5 + 4], tokens[:, 2 + 2 * 5 + 4] + position)
    added.sum().backward()
    assert all((parameter.grad != 0).all() for parameter in positions.parameters())


@pytest.mark.parametrize("kind", MAKE)
def test_resizing_to_the_same_size_is_the_identity(kind):
    positions = MAKE[kind]()
    before = dict(positions.named_parameters())
    assert positions.resize(15 if kind == "1d" else GRID) is positions
    assert all(parameter is before[name] for name, parameter in positions.named_parameters())


def test_resizing_is_timms():
    positions = torch.randn(1, 15, 11)
    ours, line = LearnedPositions2d(GRID, 11), LearnedPositions1d(15, 11)
    for old, grid in (*((GRID, grid) for grid in ((6, 10), (2, 3), (7, 5))), ((15, 1), (37, 1))):
        expected = timm.layers.resample_abs_pos_embed(
            positions, new_size=grid, old_size=old, num_prefix_tokens=0
        )
        torch.testing.assert_close(resize_positions(positions, old, grid), expected)
        if old == GRID:
            ours.table.data, ours.grid = positions[0], GRID
            torch.testing.assert_close(ours.resize(grid).table, expected[0])
        else:
            line.table.data = positions[0]
            torch.testing.assert_close(line.resize(grid[0]).table, expected[0])


@pytest.mark.parametrize("grid", [(7, 11), (2, 3), (5, 2)])
def test_factorized_resized_is_its_sum_resized(grid):
    """Resampling takes one axis at a time and keeps what is constant along it."""
    positions = FactorizedPositions2d(GRID, 7).double()
    expected = resize_positions(positions.positions(), GRID, grid)
    torch.testing.assert_close(positions.resize(grid).positions(), expected)
    assert positions(torch.zeros(1, grid[0] * grid[1], 7).double()).shape[1] == len(expected)


@pytest.mark.parametrize("kind", MAKE)
def test_moved_copied_saved_and_compiled(kind):
    positions = MAKE[kind]()
    tokens = torch.randn(2, 15, 7)
    for parameter in positions.parameters():
        torch.nn.init.normal_(parameter)
    other = MAKE[kind]()
    other.load_state_dict(positions.state_dict())
    assert torch.equal(other(tokens), positions(tokens))
    double = copy.deepcopy(positions).double()
    torch.testing.assert_close(double(tokens.double()), positions(tokens).double())
    half = copy.deepcopy(positions).bfloat16().resize(7 if kind == "1d" else (2, 2))
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    torch._dynamo.reset()
    compiled = torch.compile(positions, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), positions(tokens))


@pytest.mark.parametrize("kind", MAKE)
def test_spread_at_the_start_freezing_and_decay(kind):
    positions = LearnedPositions1d(97, 89, std=0.3)
    values = positions.table
    if kind != "1d":
        positions = {"2d": LearnedPositions2d, "factorized": FactorizedPositions2d}[kind]
        positions = positions((97, 89), 31, std=0.3)
        values = positions.positions()
    assert values.std().item() == pytest.approx(0.3, rel=0.05)
    assert positions.no_weight_decay() == {name for name, _ in positions.named_parameters()}
    positions.requires_grad_(False).resize(11 if kind == "1d" else (5, 7))
    assert not any(parameter.requires_grad for parameter in positions.parameters())


def some(tokens, dim=7):
    return torch.randn(1, tokens, dim)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sincos_1d(3, 7), "dim: 7 is not a multiple of 2"),
        (lambda: sincos_1d(0, 6), "num_positions: expected at least 1, got 0"),
        (lambda: sincos_1d(3, 0), "dim: expected at least 1, got 0"),
        (lambda: sincos_2d(GRID, 6), "dim: 6 is not a multiple of 4"),
        (lambda: sincos_2d((3, 0), 8), "columns: expected at least 1, got 0"),
        (lambda: LearnedPositions1d(0, 7), "num_positions: expected at least 1, got 0"),
        (lambda: LearnedPositions1d(5, 7).resize(0), "num_positions: expected at least 1, got 0"),
        (lambda: LearnedPositions1d(5, 7)(some(6)), "0 to 5, but num_positions is 5"),
        (lambda: LearnedPositions1d(5, 7)(some(2), start=4), "tokens: positions 4 to 5, but num"),
        (lambda: LearnedPositions1d(5, 7)(some(2), start=-1), "tokens: positions -1 to 0, but"),
        (lambda: LearnedPositions1d(5, 7)(some(2, 1)), r"expected \[batch, tokens, 7\], got \[1,"),
        (lambda: LearnedPositions2d((3, 0), 7), "columns: expected at least 1, got 0"),
        (lambda: LearnedPositions2d(GRID, 7, num_prefix_tokens=-1), "num_prefix_tokens: expected"),
        (
            lambda: LearnedPositions2d(GRID, 7, num_prefix_tokens=1)(some(15)),
            "tokens: 15 tokens, expected 1 before the grid 3 x 5",
        ),
        (lambda: FactorizedPositions2d(GRID, 7)(some(1)), "tokens: 1 tokens, expec"),
        (lambda: FactorizedPositions2d(GRID, 7).resize((0, 2)), "rows: expected at least 1, got 0"),
        (lambda: resize_positions(torch.randn(1, 14, 4), GRID, (2, 2)), "do not fill old_grid 3"),
    ],
)
def test_wrong_sizes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
