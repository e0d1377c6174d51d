"""MultiHeadAttention: against torch's, its forms against each other, and its refusals."""

import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from attnkit import Causal, Dense, MultiHeadAttention, Padding

BATCH, QUERIES, KEYS, DIM, HEADS = 3, 5, 7, 22, 11


def randomised(**options):
    torch.manual_seed(0)
    block = MultiHeadAttention(DIM, options.pop("num_heads", HEADS), **options)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block.double()


def by_torch(block, query, key, value, **options):
    """The same attention by torch.nn.functional's multi-head attention, weights copied."""
    separate = {}
    in_weight, in_bias = None, None
    if block.is_fused:
        in_weight, in_bias = block.in_proj.weight, block.in_proj.bias
    else:
        projections = (block.query_proj, block.key_proj, block.value_proj)
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        separate = {n: p.weight for n, p in zip(names, projections, strict=True)}
        separate["use_separate_proj_weight"] = True
        in_bias = torch.cat([p.bias for p in projections])
    output, weights = F.multi_head_attention_forward(
        *(tensor.transpose(0, 1) for tensor in (query, key, value)),
        block.dim, block.num_heads, in_weight, in_bias, None, None, False, 0.0,
        block.out_proj.weight, block.out_proj.bias,
        training=False, average_attn_weights=False, **separate, **options,
    )  # fmt: skip
    return output.transpose(0, 1), weights


@pytest.mark.parametrize("key_dim", [DIM, 13])
@pytest.mark.parametrize("form", ["self", "cross", "three"])
def test_equals_torch(form, key_dim):
    if form == "self" and key_dim != DIM:
        form = "three"
    block = randomised(key_dim=key_dim)
    query = torch.randn(BATCH, QUERIES, DIM, dtype=torch.float64, requires_grad=True)
    key = torch.randn(BATCH, KEYS, key_dim, dtype=torch.float64)
    value = torch.randn(BATCH, KEYS, key_dim, dtype=torch.float64)
    given = {"self": (query,), "cross": (query, key), "three": (query, key, value)}[form]
    full = {"self": (query,) * 3, "cross": (query, key, key), "three": given}[form]
    lengths = torch.tensor([full[1].shape[1], 2, 3])
    hidden = torch.arange(full[1].shape[1]) >= lengths[:, None]
    expected, expected_weights = by_torch(block, *full, key_padding_mask=hidden)
    actual = block(*given, mask=Padding(lengths))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        block.attention_weights(*given, mask=Padding(lengths)), expected_weights
    )
    wanted = [query, *block.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(actual.square().sum(), wanted),
        torch.autograd.grad(expected.square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_fused_self_attention_is_cross_attention_with_itself():
    block = randomised(num_kv_heads=1)
    x = torch.randn(BATCH, QUERIES, DIM, dtype=torch.float64)
    torch.testing.assert_close(block(x), block(x, x.clone()))
    torch.testing.assert_close(block(x), block(x, x.clone(), x.clone()))
    torch.testing.assert_close(block(x[:, :1], x), block(x)[:, :1])


def test_grouped_query_is_repeated_heads():
    grouped = randomised(num_heads=6, num_kv_heads=2, head_dim=5)
    plain = randomised(num_heads=6, head_dim=5)
    plain.out_proj.load_state_dict(grouped.out_proj.state_dict())
    for name in ("weight", "bias"):
        query, key, value = getattr(grouped.in_proj, name).detach().split(grouped.sizes)
        repeated = [
            t.unflatten(0, (2, 5)).repeat_interleave(3, 0).flatten(0, 1) for t in (key, value)
        ]
        getattr(plain.in_proj, name).data = torch.cat([query, *repeated])
    x = torch.randn(BATCH, QUERIES, DIM, dtype=torch.float64)
    torch.testing.assert_close(grouped(x, mask=Causal()), plain(x, mask=Causal()))
    torch.testing.assert_close(
        grouped.attention_weights(x, heads=[5, 1]), plain.attention_weights(x)[:, [5, 1]]
    )


def test_qk_norm_and_positions_come_in_this_order():
    block = randomised(qk_norm=True)
    x = torch.randn(BATCH, QUERIES, DIM, dtype=torch.float64)
    seen = []

    def positions(query, key):
        seen.extend([query, key])
        return 2 * query, -key

    output = block(x, positions=positions)
    query, key, value = (
        t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in block.in_proj(x).chunk(3, dim=-1)
    )
    norm = [F.layer_norm(t, (2,), m.weight, m.bias, 1e-6)
            for t, m in ((query, block.query_norm), (key, block.key_norm))]  # fmt: skip
    torch.testing.assert_close(seen, norm)
    heads = F.scaled_dot_product_attention(2 * norm[0], -norm[1], value)
    torch.testing.assert_close(output, block.out_proj(heads.transpose(1, 2).flatten(2)))


def test_dropout_only_in_training():
    block = MultiHeadAttention(DIM, HEADS, dropout_p=0.5)
    x = torch.randn(BATCH, QUERIES, DIM)
    assert not torch.equal(block(x), block(x))
    block.eval()
    torch.testing.assert_close(block(x), block(x))
    block.dropout_p = 0.0
    in_evaluation = block(x)
    torch.testing.assert_close(block.train()(x), in_evaluation)


def test_a_row_that_looks_nowhere_is_the_output_bias():
    block = MultiHeadAttention(DIM, HEADS)
    torch.nn.init.normal_(block.out_proj.bias)
    allowed = torch.ones(QUERIES, QUERIES, dtype=torch.bool)
    allowed[3] = False
    x = torch.randn(BATCH, QUERIES, DIM, requires_grad=True)
    for training in (True, False):
        output = block.train(training)(x, mask=Dense(allowed))
        torch.testing.assert_close(output[:, 3], block.out_proj.bias.expand(BATCH, DIM))
        (gradient,) = torch.autograd.grad(output[:, 3].sum(), x)
        assert (gradient == 0).all()


def test_what_is_masked_changes_nothing():
    block = randomised()
    x = torch.randn(BATCH, QUERIES, DIM, dtype=torch.float64)
    changed = x.clone()
    changed[1, 3:] += 5
    changed[2] -= 3
    lengths = torch.tensor([QUERIES, 3, QUERIES])
    before, after = (block(t, mask=Padding(lengths)) for t in (x, changed))
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=0)
    torch.testing.assert_close(before[1, :3], after[1, :3])
    causal = block(x, mask=Causal())
    torch.testing.assert_close(block(changed, mask=Causal())[1, :3], causal[1, :3])
    assert not torch.allclose(block(changed, mask=Causal())[1, 3:], causal[1, 3:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((22, 5), "num_heads: 5 does not divide dim 22"),
        ((20, 5, {"sink": "yes"}), "sink: expected True or False, got 'yes'"),
        ((20, 5, {"sink": torch.zeros(5)}), r"sink: expected True or False, got a tensor \[5\]"),
        ((20, 5, {"sink": True, "normalizer": "linear"}), "sink: expected softmax, .* got linear"),
        ((20, 5, {"sink": True, "normalizer": "delta_rule"}), "sink: expected softmax, .* got del"),
        ((22, 0), "num_heads: expected at least 1, got 0"),
        ((22, 11, {"num_kv_heads": 2}), "num_kv_heads: 2 does not divide num_heads 11"),
        ((22, 11, {"head_dim": 0}), "head_dim: expected at least 1, got 0"),
        ((22, 11, {"value_head_dim": 0}), "value_head_dim: expected at least 1, got 0"),
        ((22, 11, {"gate": True}), "gate: expected 'elementwise', 'head' or None, got True"),
        ((22, 11, {"norm_eps": 1e-6}), "norm_eps: only qk_norm=True has one, got 1e-06 without"),
        ((22, 11, {"dropout_p": 1.5}), "dropout_p: expected 0 <= dropout_p < 1, got 1.5"),
    ],
    ids=str,
)
def test_wrong_sizes_are_named(arguments, message):
    *sizes, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises((ValueError, TypeError), match=message):
        MultiHeadAttention(*sizes, **options)
    with pytest.raises(ValueError, match="value: given without key"):
        MultiHeadAttention(DIM, HEADS)(torch.ones(1, 1, DIM), value=torch.ones(1, 1, DIM))


@pytest.mark.parametrize("gate", [None, "elementwise", "head"])
@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_values_of_another_width(num_kv_heads, gate):
    """Written plainly; and step by step from a cache."""
    block = randomised(
        num_heads=2, num_kv_heads=num_kv_heads, head_dim=3, value_head_dim=5, gate=gate
    )
    assert block.in_proj.out_features == 2 * 3 + num_kv_heads * (3 + 5)
    tokens = torch.randn(BATCH, QUERIES, DIM, dtype=torch.float64, requires_grad=True)
    query, key, value = (tokens @ block.in_proj.weight.T + block.in_proj.bias).split(
        [6, 3 * num_kv_heads, 5 * num_kv_heads], dim=-1
    )
    heads = []
    for head in range(2):
        kv = head % num_kv_heads
        scores = query[..., 3 * head :][..., :3] @ key[..., 3 * kv :][..., :3].mT / 3**0.5
        weights = scores.masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf).softmax(-1)
        output = weights @ value[..., 5 * kv :][..., :5]
        if gate is not None:
            opened = block.gate_proj(tokens).sigmoid()
            output = output * (
                opened[..., [head]] if gate == "head" else opened[..., 5 * head :][..., :5]
            )
        heads.append(output)
    expected = block.out_proj(torch.cat(heads, dim=-1))
    actual = block(tokens, mask=Causal())
    torch.testing.assert_close(actual, expected)
    wanted = [tokens, *block.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(actual.square().sum(), wanted),
        torch.autograd.grad(expected.square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        cache = block.new_cache(BATCH, QUERIES)
        steps = [block(token, cache=cache) for token in tokens.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected)


def test_a_reader_of_self_attention_opens_few_files():
    """From `forward` to torch's operator and back, and the backward too."""
    block = MultiHeadAttention(8, 2)
    files = set()

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if "attnkit" in path.parts and "tests" not in path.parts:
            files.add(path.name)

    tokens = torch.randn(2, 5, 8)
    block(tokens)  # what is made once is made
    sys.setprofile(note)
    try:
        block(tokens).sum().backward()
    finally:
        sys.setprofile(None)
    assert files == {"multihead.py", "attend.py", "sdpa.py", "base.py"}
