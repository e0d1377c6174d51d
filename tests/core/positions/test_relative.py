"""Relative positions: rotary ones and biases, by which scores see differences only."""

import copy

import pytest
import timm.layers
import torch

from attnkit import ALiBi, Causal, RelativeBias1d, RelativeBias2d, Rotary1d, Rotary2d, attend

GRID = (3, 5)


def line(head_dim=10, max_tokens=13, **options):
    return Rotary1d(head_dim, max_tokens, dtype=torch.float64, **options)


def constant(tokens, dim):
    """One random vector at every token, `[1, 1, tokens, dim]`."""
    return torch.randn(dim, dtype=torch.float64).expand(1, 1, tokens, dim)


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


def test_a_prefix_moves_the_grid_and_is_left_alone():
    prefix = 2
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


@pytest.mark.parametrize("num_heads", [1, 2, 5, 8, 12])
def test_alibi_is_its_formula(num_heads):
    bias = ALiBi(num_heads)(5, 7, offset=2)
    powers = {1: [8], 2: [4, 8], 8: range(1, 9)}
    powers[5] = [2, 4, 6, 8, 1]
    powers[12] = [*range(1, 9), 0.5, 1.5, 2.5, 3.5]
    slopes = 2.0 ** -torch.tensor([float(power) for power in powers[num_heads]])
    distance = (torch.arange(7) - torch.arange(5)[:, None] - 2).abs()
    torch.testing.assert_close(bias, -slopes[None, :, None, None] * distance)


def test_alibi_under_causal_is_the_papers():
    query, key, value = torch.randn(3, 2, 3, 7, 5, dtype=torch.float64).unbind()
    alibi = ALiBi(3).double()
    papers = alibi.slopes[:, None, None] * torch.arange(7)
    symmetric = attend(query, key, value, mask=Causal(), bias=alibi(7))
    torch.testing.assert_close(symmetric, attend(query, key, value, mask=Causal(), bias=papers))


def test_relative_1d_is_its_formula():
    module = RelativeBias1d(3, 4)
    bias = module(11, 7, offset=-2)
    for i in range(11):
        for j in range(7):
            distance = max(-4, min(4, j - i + 2))
            assert torch.equal(bias[0, :, i, j], module.table[distance + 4])
    bias[:, 1].sum().backward()
    assert module.table.grad[:, 1].sum() == 77
    assert (module.table.grad[:, [0, 2]] == 0).all()


def test_relative_2d_is_torchvisions_and_timms():
    from timm.models.swin_transformer import WindowAttention
    from torchvision.models.swin_transformer import ShiftedWindowAttention

    theirs = ShiftedWindowAttention(12, [3, 5], [0, 0], 2)
    timms = WindowAttention(12, 2, window_size=(3, 5))
    ours, prefixed = RelativeBias2d(2, 3, 5), RelativeBias2d(2, 3, 5, num_prefix_tokens=1)
    with torch.no_grad():
        ours.table.normal_()
        for table in (theirs.relative_position_bias_table, timms.relative_position_bias_table):
            table.copy_(ours.table)
        prefixed.table.copy_(ours.table)
    assert torch.equal(ours(), theirs.get_relative_position_bias())
    assert torch.equal(ours()[0], timms._get_rel_pos_bias().reshape(2, 15, 15))
    assert torch.equal(prefixed(), torch.nn.functional.pad(ours(), (1, 0, 1, 0)))
    # and through the attention, torchvision's with its own projections
    x = torch.randn(2, 3, 5, 12)
    with torch.no_grad():
        heads = theirs.qkv(x).flatten(1, 2).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        output = attend(*heads.unbind(), bias=ours()).transpose(1, 2).flatten(2)
        torch.testing.assert_close(theirs.proj(output), theirs(x).flatten(1, 2))


def test_relative_2d_is_resized():
    module = RelativeBias2d(2, 3, 5, num_prefix_tokens=1)
    assert torch.equal(module.resized(3, 5).table, module.table)
    with torch.no_grad():  # a plane stays nearly one
        y, x = torch.meshgrid(torch.arange(-2.0, 3), torch.arange(-4.0, 5), indexing="ij")
        module.table.copy_(torch.stack([y, 3 * x], dim=-1).view(-1, 2))
    larger = module.resized(7, 11)
    assert larger().shape == (1, 2, 78, 78)
    table = larger.table.view(13, 21, 2)
    assert torch.allclose(table[6, 10], torch.zeros(2), atol=1e-5)  # no offset stays none
    middle = table[4:9, 7:14]
    assert torch.allclose(middle[1:, :, 0] - middle[:-1, :, 0], torch.tensor(5 / 13), atol=0.1)
    assert torch.allclose(middle[:, 1:, 1] - middle[:, :-1, 1], torch.tensor(27 / 21), atol=0.3)


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
        (lambda: Rotary1d(8, 5).rotation(4)(*tokens(3)), "query: 3 tokens, but the rotation is"),
        (lambda: Rotary2d(6, GRID), "head_dim: 6 is not a multiple of 4"),
        (lambda: Rotary2d(8, (0, 5)), "rows: expected at least 1, got 0"),
        (lambda: Rotary2d(8, GRID, num_prefix_tokens=-1), "num_prefix_tokens: expected at least 0"),
        (lambda: Rotary2d(8, GRID)(*tokens(14)), "14 tokens, but the rotation is for 15"),
        (lambda: ALiBi(0), "num_heads: expected at least 1, got 0"),
        (lambda: RelativeBias1d(3, 0), "max_distance: expected at least 1, got 0"),
        (lambda: RelativeBias2d(3, 0, 5), "height: expected at least 1, got 0"),
        (lambda: RelativeBias2d(3, 3, 5, num_prefix_tokens=-1), "num_prefix_tokens: expected"),
    ],
)
def test_wrong_sizes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
