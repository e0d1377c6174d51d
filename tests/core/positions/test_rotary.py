"""Rotary positions: scores see differences only, and decoding with a cache is one long sequence."""

import copy

import pytest
import timm.layers
import torch

import attnkit
from attnkit import Causal, MultiHeadAttention, Padding, Rotary1d, Rotary2d

GRID = (3, 5)


def line(head_dim=10, max_tokens=13, **options):
    return Rotary1d(head_dim, max_tokens, dtype=torch.float64, **options)


def constant(tokens, dim):
    """One random vector at every token, `[1, 1, tokens, dim]`."""
    return torch.randn(dim, dtype=torch.float64).expand(1, 1, tokens, dim)


@pytest.mark.parametrize("start", [0, 2])
def test_scores_in_1d_depend_on_differences_only(start):
    query, key = line().rotation(11, start)(constant(11, 10), constant(11, 10))
    scores = (query @ key.transpose(-2, -1))[0, 0]
    values = []
    for difference in range(-10, 11):
        diagonal = scores.diagonal(difference)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
        values.append(diagonal[0])
    assert len(torch.stack(values).unique()) == 21


def test_1d_is_a_product_with_complex_units():
    """Su et al. 2021, equation 12: (x_i, x_{i + d/2}) as a complex number times e^{i p w}."""
    query, key = torch.randn(2, 3, 2, 7, 10, dtype=torch.float64)
    bands = 100.0 ** (-torch.arange(5, dtype=torch.float64) / 5)
    angles = torch.arange(4, 11, dtype=torch.float64)[:, None] * bands
    units = torch.polar(torch.ones_like(angles), angles)
    rotated = line(temperature=100.0).rotation(7, start=4)(query, key)
    for actual, given in zip(rotated, (query, key), strict=True):
        product = torch.complex(given[..., :5], given[..., 5:]) * units
        torch.testing.assert_close(actual, torch.cat([product.real, product.imag], dim=-1))
        torch.testing.assert_close(actual.norm(dim=-1), given.norm(dim=-1))
    first = line().rotation(1)(query[:, :, :1], key[:, :, :1])
    assert torch.equal(first[0], query[:, :, :1])


@pytest.mark.parametrize("half", [True, False])
def test_1d_equals_timm(half):
    """In timm's half layout as it is, in its interleaved one after a permutation of channels."""
    bands = 10000.0 ** (-torch.arange(5) / 5)
    sin, cos = timm.layers.build_rotary_pos_embed([7], bands=bands, in_pixels=False,
                                                  rotate_half=half)  # fmt: skip
    query, key = torch.randn(2, 3, 2, 7, 10)
    order = torch.arange(10) if half else torch.arange(10).view(2, 5).T.flatten()
    expected = [
        timm.layers.apply_rot_embed(t[..., order], sin, cos, half=half) for t in (query, key)
    ]
    ours = [turned[..., order] for turned in Rotary1d(10, 7)(query, key)]
    torch.testing.assert_close(ours, expected)


def test_2d_equals_timm():
    embed = timm.layers.RotaryEmbeddingCat(8, temperature=100.0, in_pixels=False, feat_shape=GRID)
    query, key = torch.randn(2, 3, 2, 15, 8)
    order = torch.arange(8).view(2, 4).T.flatten()  # timm's pairs are neighbours
    expected = [
        timm.layers.apply_rot_embed_cat(t[..., order], embed.get_embed()) for t in (query, key)
    ]
    ours = [turned[..., order] for turned in Rotary2d(8, GRID)(query, key)]
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("chunks", [(1,) * 11, (4, 1, 6)])
def test_keys_turned_before_they_are_cached(chunks):
    """Each chunk turned from where it starts, against all tokens at once."""
    query, key, value = torch.randn(3, 2, 3, 11, 10, dtype=torch.float64)
    rotary = line()
    turned_query, turned_key = rotary(query, key)
    whole = attnkit.attend(turned_query, turned_key, value, mask=Causal())
    cache, outputs, start = key[:, :, :0], [], 0
    for size in chunks:
        now = slice(start, start + size)
        turned_query, new = rotary.rotation(size, start)(query[:, :, now], key[:, :, now])
        cache = torch.cat([cache, new], dim=2)
        mask = Causal(align="bottom_right")
        outputs.append(attnkit.attend(turned_query, cache, value[:, :, : now.stop], mask=mask))
        start += size
    torch.testing.assert_close(torch.cat(outputs, dim=2), whole)


def test_padding_on_the_left_changes_nothing_with_positions_of_their_own():
    block = MultiHeadAttention(20, 2).double()
    rotary = line()
    tokens = torch.randn(2, 7, 20, dtype=torch.float64)
    alone = block(tokens, mask=Causal(), positions=rotary)
    padded = torch.cat([torch.randn(2, 3, 20, dtype=torch.float64), tokens], dim=1)
    real = (torch.arange(10) >= 3).expand(2, 10)
    places = (real.cumsum(1) - 1).clamp(min=0)
    mask = Causal() & Padding(real)
    at = block(padded, mask=mask, positions=rotary.rotation_at(places))
    torch.testing.assert_close(at[:, 3:], alone)


def test_positions_of_packed_sequences_begin_anew():
    rotary = line()
    query, key = torch.randn(2, 2, 3, 7, 10, dtype=torch.float64)
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4]])
    ours = rotary.rotation_at(places)(query, key)
    for item, cut in ((0, 4), (1, 2)):
        for part in (slice(cut), slice(cut, None)):
            expected = rotary(query[item : item + 1, :, part], key[item : item + 1, :, part])
            for turned, right in zip(ours, expected, strict=True):
                torch.testing.assert_close(turned[item : item + 1, :, part], right)


def test_grouped_heads_turn_alike():
    query, key = torch.randn(3, 4, 7, 10), torch.randn(3, 2, 7, 10)
    turned = Rotary1d(10, 7)(query, key)
    repeated = Rotary1d(10, 7)(query, key.repeat_interleave(2, dim=1))
    assert torch.equal(turned[1].repeat_interleave(2, dim=1), repeated[1])


def test_scores_in_2d_depend_on_differences_only():
    rotary = Rotary2d(8, GRID, num_prefix_tokens=2, dtype=torch.float64)
    query, key = rotary(constant(17, 8), constant(17, 8))
    scores = (query @ key.transpose(-2, -1))[0, 0, 2:, 2:].view(*GRID, *GRID)
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


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_a_prefix_moves_the_grid_and_is_left_alone(prefix):
    rotary = Rotary2d(8, GRID, num_prefix_tokens=prefix)
    query, key = torch.randn(2, 3, 11, 15 + prefix, 8)
    turned_query, turned_key = rotary(query, key)
    assert torch.equal(turned_query[:, :, :prefix], query[:, :, :prefix])
    expected = Rotary2d(8, GRID)(query[:, :, prefix:], key[:, :, prefix:])
    assert torch.equal(turned_query[:, :, prefix:], expected[0])
    assert torch.equal(turned_key[:, :, prefix:], expected[1])
    torch.testing.assert_close(turned_key.norm(dim=-1), key.norm(dim=-1))
    assert not torch.allclose(turned_key[:, :, prefix + 1 :], key[:, :, prefix + 1 :])


def test_2d_of_some_patches_and_of_the_first_queries():
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


@pytest.mark.parametrize("rotary", [Rotary1d(8, 15), Rotary2d(8, GRID)], ids=["1d", "2d"])
def test_moved_copied_and_saved(rotary):
    assert not rotary.state_dict()
    query, key = torch.randn(2, 1, 2, 15, 8)
    whole = rotary(query, key)
    torch.testing.assert_close(copy.deepcopy(rotary)(query, key), whole, rtol=0, atol=0)
    double = copy.deepcopy(rotary).to(torch.float64)
    assert double.cos.dtype == torch.float64
    expected = tuple(turned.double() for turned in whole)
    turned = double(query.double(), key.double())
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-6)
    # tokens keep their dtype, whatever the table's
    assert [t.dtype for t in double(query, key.bfloat16())] == [torch.float32, torch.bfloat16]
    with torch.device("meta"):
        moved = copy.deepcopy(rotary).to("meta")
        assert moved(query.to("meta"), key.to("meta"))[0].device.type == "meta"


def test_compiled():
    torch._dynamo.reset()
    rotary = Rotary1d(10, 13)

    def both(query, key, places):
        one = rotary.rotation(7, start=5)(query, key)
        return *one, *rotary.rotation_at(places)(query, key)

    given = (*torch.randn(2, 3, 2, 7, 10), torch.randint(13, (3, 7)))
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), both(*given))


def tokens(count, dim=8):
    return torch.randn(2, 1, 1, count, dim)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Rotary1d(7, 5), "head_dim: 7 is not a multiple of 2"),
        (lambda: Rotary1d(8, 0), "max_tokens: expected at least 1, got 0"),
        (lambda: Rotary1d(8, 5)(*tokens(6)), "positions 0 to 5, but max_tokens is 5"),
        (lambda: Rotary1d(8, 5).rotation(2, start=4), "positions 4 to 5, but max_tokens is 5"),
        (lambda: Rotary1d(8, 5).rotation(2, start=-1), "positions -1 to 0, but max_tokens is 5"),
        (lambda: Rotary1d(8, 5).rotation_at(torch.tensor([[0, 5]])), "positions: 0 to 5, but max"),
        (lambda: Rotary1d(8, 5).rotation_at(torch.tensor([[-1, 0]])), "positions: -1 to 0, but"),
        (lambda: Rotary1d(8, 5).rotation_at(torch.arange(3)), r"integers \[batch, tokens\], got"),
        (lambda: Rotary1d(8, 5).rotation_at(torch.zeros(1, 3)), "got torch.float32"),
        (lambda: Rotary1d(8, 5)(*tokens(3, dim=16)), "query: head_dim 16, but the rotation is for"),
        (
            lambda: Rotary1d(8, 5).rotation(4)(*tokens(3)),
            "query: 3 tokens, but the rotation is for",
        ),
        (lambda: Rotary2d(6, GRID), "head_dim: 6 is not a multiple of 4"),
        (lambda: Rotary2d(8, (0, 5)), "rows: expected at least 1, got 0"),
        (lambda: Rotary2d(8, GRID, num_prefix_tokens=-1), "num_prefix_tokens: expected at least 0"),
        (lambda: Rotary2d(8, GRID)(*tokens(14)), "14 tokens, but the rotation is for 15"),
    ],
)
def test_wrong_sizes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
