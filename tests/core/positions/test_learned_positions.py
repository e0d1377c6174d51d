"""Learned positions: what they add, and what resampling keeps."""

import copy

import pytest
import timm.layers
import torch
from torch.nn.functional import embedding

from attnkit import FactorizedPositions2d, LearnedPositions1d, LearnedPositions2d
from attnkit.core.positions.absolute import resize_positions

GRID = (3, 5)
MAKE = {
    "1d": lambda **options: LearnedPositions1d(15, 7, **options),
    "2d": lambda **options: LearnedPositions2d(GRID, 7, **options),
    "factorized": lambda **options: FactorizedPositions2d(GRID, 7, **options),
}


def ramp(*sizes):
    """Vectors that are linear in each index, `[*sizes, 7]` in float64, and constant in one."""
    directions = torch.randn(len(sizes) + 1, 7, dtype=torch.float64)
    directions[:-1, 3] = 0
    axes = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in sizes), indexing="ij")
    return directions[-1] + sum(a[..., None] * d for a, d in zip(axes, directions, strict=False))


def test_1d_adds_the_row_of_each_position():
    positions = LearnedPositions1d(11, 7)
    tokens = torch.randn(3, 5, 7)
    for start in (0, 6):
        rows = torch.arange(start, start + 5)
        assert torch.equal(
            positions(tokens, start=start), tokens + embedding(rows, positions.table)
        )
    # a token at a time is all of them at once
    steps = [positions(tokens[:, t : t + 1], start=t) for t in range(5)]
    assert torch.equal(torch.cat(steps, dim=1), positions(tokens))


@pytest.mark.parametrize("kind", ["2d", "factorized"])
@pytest.mark.parametrize("prefix", [0, 2])
def test_2d_adds_to_patches_and_leaves_the_prefix_alone(kind, prefix):
    positions = MAKE[kind](num_prefix_tokens=prefix)
    tokens = torch.randn(3, prefix + 15, 7)
    added = positions(tokens)
    assert torch.equal(added[:, :prefix], tokens[:, :prefix])
    grid = positions.positions().view(*GRID, 7)
    assert torch.equal(added[:, prefix + 2 * 5 + 4], tokens[:, prefix + 2 * 5 + 4] + grid[2, 4])
    added.sum().backward()
    assert all((parameter.grad != 0).all() for parameter in positions.parameters())


def test_factorized_differences_of_rows_are_the_same_in_every_column():
    positions = FactorizedPositions2d(GRID, 7).double()
    grid = positions.positions().view(*GRID, 7)
    torch.testing.assert_close(grid[1:] - grid[:1], (grid[1:, :1] - grid[:1, :1]).expand(2, 5, 7))
    assert sum(p.numel() for p in positions.parameters()) == (3 + 5) * 7
    # any such positions can be written so
    columns, rows = ramp(5), ramp(3)
    positions.load_state_dict({"row_table": rows, "column_table": columns})
    assert torch.equal(positions.positions()[2 * 5 + 4], rows[2] + columns[4])


@pytest.mark.parametrize("kind", MAKE)
def test_resizing_to_the_same_size_is_the_identity(kind):
    positions = MAKE[kind]()
    before = dict(positions.named_parameters())
    assert positions.resize(15 if kind == "1d" else GRID) is positions
    assert all(parameter is before[name] for name, parameter in positions.named_parameters())


@pytest.mark.parametrize("num_positions", [9, 15, 37, 90, 101])
def test_1d_resampled(num_positions):
    positions = LearnedPositions1d(45, 7).double()
    positions.table.data = table = ramp(45)
    resized = positions.resize(num_positions).table
    scale = 45 / num_positions
    # the middle of new position j, in old positions
    middles = (torch.arange(num_positions, dtype=torch.float64) + 0.5) * scale - 0.5
    expected = table[0] + middles[:, None] * (table[1] - table[0])
    reach = 2 * max(scale, 1)  # of the cubic, in old positions
    inside = (middles >= reach) & (middles <= 44 - reach)
    assert inside.any()
    # antialiasing by a factor that is not whole weighs the two sides a little differently
    atol = 1e-12 if scale <= 1 or scale == int(scale) else 0.05
    torch.testing.assert_close(resized[inside], expected[inside], rtol=0, atol=atol)
    torch.testing.assert_close(resized[:, 3], table[:1, 3].expand(num_positions))


@pytest.mark.parametrize("kind", ["2d", "factorized"])
def test_2d_resampled(kind):
    rows, columns = ramp(13), ramp(11)
    if kind == "2d":
        positions = LearnedPositions2d((13, 11), 7).double()
        positions.load_state_dict({"table": (rows[:, None] + columns).flatten(0, 1)})
    else:
        positions = FactorizedPositions2d((13, 11), 7).double()
        positions.load_state_dict({"row_table": rows, "column_table": columns})
    grid = positions.resize((26, 33)).positions().view(26, 33, 7)
    assert positions.grid == (26, 33)
    y, x = ((torch.arange(n, dtype=torch.float64) + 0.5) / f - 0.5 for n, f in ((26, 2), (33, 3)))
    expected = (rows[0] + y[:, None] * (rows[1] - rows[0]))[:, None]
    expected = expected + columns[0] + x[:, None] * (columns[1] - columns[0])
    torch.testing.assert_close(grid[5:-5, 7:-7], expected[5:-5, 7:-7])
    assert positions(torch.zeros(1, 26 * 33, 7)).shape == (1, 26 * 33, 7)


@pytest.mark.parametrize("grid", [(7, 11), (2, 3), (5, 2)])
def test_factorized_resized_is_its_sum_resized(grid):
    """Resampling takes one axis at a time and keeps what is constant along it."""
    positions = FactorizedPositions2d(GRID, 7).double()
    expected = resize_positions(positions.positions(), GRID, grid)
    torch.testing.assert_close(positions.resize(grid).positions(), expected)


def test_resize_equals_timm():
    positions = torch.randn(1, 15, 11)
    ours = LearnedPositions2d(GRID, 11)
    for grid in ((6, 10), (2, 3), (7, 5)):
        expected = timm.layers.resample_abs_pos_embed(
            positions, new_size=grid, old_size=GRID, num_prefix_tokens=0
        )
        torch.testing.assert_close(resize_positions(positions, GRID, grid), expected)
        ours.table.data, ours.grid = positions[0], GRID
        torch.testing.assert_close(ours.resize(grid).table, expected[0])
    assert resize_positions(positions, GRID, GRID) is positions


@pytest.mark.parametrize("kind", MAKE)
def test_moved_copied_saved_and_compiled(kind):
    positions = MAKE[kind]()
    tokens = torch.randn(2, 15, 7)
    for parameter in positions.parameters():
        torch.nn.init.normal_(parameter)
    other = MAKE[kind]()
    other.load_state_dict(positions.state_dict())
    assert torch.equal(other(tokens), positions(tokens))
    assert torch.equal(copy.deepcopy(positions)(tokens), positions(tokens))
    double = copy.deepcopy(positions).double()
    assert double(tokens.double()).dtype == torch.float64
    torch.testing.assert_close(double(tokens.double()).float(), positions(tokens))
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LearnedPositions1d(0, 7), "num_positions: expected at least 1, got 0"),
        (lambda: LearnedPositions1d(5, 7).resize(0), "num_positions: expected at least 1, got 0"),
        (lambda: LearnedPositions1d(5, 7)(torch.randn(1, 6, 7)), "0 to 5, but num_positions is 5"),
        (
            lambda: LearnedPositions1d(5, 7)(torch.randn(1, 2, 7), start=4),
            "tokens: positions 4 to 5, but num_positions is 5",
        ),
        (
            lambda: LearnedPositions1d(5, 7)(torch.randn(1, 2, 7), start=-1),
            "tokens: positions -1 to 0, but",
        ),
        (
            lambda: LearnedPositions1d(5, 7)(torch.randn(1, 2, 1)),
            r"tokens: expected \[batch, tokens, 7\], got \[1, 2, 1\]",
        ),
        (lambda: LearnedPositions2d((3, 0), 7), "columns: expected at least 1, got 0"),
        (
            lambda: LearnedPositions2d(GRID, 7, num_prefix_tokens=-1),
            "num_prefix_tokens: expected at least 0, got -1",
        ),
        (
            lambda: LearnedPositions2d(GRID, 7, num_prefix_tokens=1)(torch.randn(1, 15, 7)),
            "tokens: 15 tokens, expected 1 before the grid 3 x 5",
        ),
        (lambda: FactorizedPositions2d(GRID, 7)(torch.randn(1, 1, 7)), "tokens: 1 tokens, expec"),
        (lambda: FactorizedPositions2d(GRID, 7).resize((0, 2)), "rows: expected at least 1, got 0"),
        (lambda: resize_positions(torch.randn(1, 14, 4), GRID, (2, 2)), "do not fill old_grid 3"),
    ],
)
def test_wrong_sizes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
