"""Decoding with a cache: step by step is all at once; normalizers and gates of the block."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import attnkit
from attnkit import Causal, Hard, KeyValueCache, MultiHeadAttention, Padding, Window
from attnkit.core.positions.relative import Rotation

BATCH, TOKENS, DIM, HEADS = 3, 13, 20, 5


def randomised(dtype=torch.float64, **options):
    torch.manual_seed(0)
    block = MultiHeadAttention(DIM, HEADS, **options)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block.to(dtype).eval()


def some_tokens(dtype=torch.float64, tokens=TOKENS, dim=DIM):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, tokens, dim, generator=generator, dtype=torch.float64).to(dtype)


def step_by_step(block, tokens, sizes, masks=None, **options):
    cache = block.new_cache(len(tokens), tokens.shape[1])
    outputs = []
    with torch.no_grad():
        for step in tokens.split(sizes, dim=1):
            # what is in the cache before its tokens are written is never read
            cache._key[:, :, cache.num_tokens :] = torch.nan
            mask = masks(cache.num_tokens + step.shape[1]) if masks else Causal("bottom_right")
            outputs.append(block(step, mask=mask, cache=cache, **options))
    assert cache.num_tokens == tokens.shape[1]
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 1, "qk_norm": True},
        {"gate": "elementwise"},
        {"gate": "head", "head_dim": 7},
        {"score": "general"},
        {"score": "cosine"},
        {"score": "gaussian"},
        {"score": "additive"},
        {"normalizer": "linear"},
        {"normalizer": "hard"},
    ],
    ids=str,
)
def test_step_by_step_is_all_at_once(options):
    block, tokens = randomised(**options), some_tokens()
    expected = block(tokens, mask=Causal())
    actual = step_by_step(block, tokens, [5, 1, 7])
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-5)


def test_beside_other_masks_and_padding():
    block, tokens = randomised(), some_tokens()
    lengths = torch.tensor([13, 7, 11])
    expected = block(tokens, mask=Window(3, 0) & Padding(lengths))
    actual = step_by_step(
        block,
        tokens,
        1,
        lambda total: Window(3, 0, "bottom_right") & Padding(lengths.clamp(max=total)),
    )
    torch.testing.assert_close(actual, expected)


def test_positions_are_kept_with_the_keys():
    block, tokens = randomised(head_dim=4), some_tokens()
    angles = torch.arange(TOKENS, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1])
    expected = block(tokens, mask=Causal(), positions=Rotation(angles.cos(), angles.sin()))
    cache = block.new_cache(BATCH, TOKENS)
    with torch.no_grad():
        outputs = [
            block(token, cache=cache, positions=Rotation(angle.cos(), angle.sin()))
            for token, angle in zip(tokens.split(1, dim=1), angles.split(1), strict=True)
        ]
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(DIM, None), (7, 11)])
def test_a_memory_is_projected_once(key_dim, value_dim):
    block = randomised(key_dim=key_dim, value_dim=value_dim, num_kv_heads=1, qk_norm=True)
    query, key = some_tokens(), some_tokens(tokens=7, dim=key_dim)
    value = None if value_dim is None else some_tokens(tokens=7, dim=value_dim)
    mask = Padding(torch.tensor([7, 3, 0]))
    memory = block.remember(key, value)
    torch.testing.assert_close(block(query, memory, mask=mask), block(query, key, value, mask=mask))
    torch.testing.assert_close(
        block.attention_weights(query, memory, mask=mask, rows=[2, 3]),
        block.attention_weights(query, key, value, mask=mask, rows=[2, 3]),
    )
    # with gradients, since nothing is written in place
    block(query, memory).sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())


def test_weights_of_a_step():
    block, tokens = randomised(), some_tokens()
    expected = block.attention_weights(tokens, mask=Causal())
    cache = block.new_cache(BATCH, TOKENS)
    with torch.no_grad(), attnkit.capture_attention(block) as captured:
        for token in tokens.split(1, dim=1):
            block(token, cache=cache)
    assert len(captured[""]) == TOKENS
    for row, weights in enumerate(captured[""]):
        torch.testing.assert_close(weights, expected[:, :, row : row + 1, : row + 1])


def test_hypotheses_that_survive():
    block, tokens = randomised(), some_tokens()
    cache = block.new_cache(BATCH, TOKENS)
    with torch.no_grad():
        block(tokens[:, :5], mask=Causal(), cache=cache)
        kept = torch.tensor([2, 2, 0, 1, 2])
        chosen = cache.select(kept)
        output = block(tokens[kept, 5:6], cache=chosen)
        expected = block(tokens[kept], mask=Causal())[:, 5:6]
    torch.testing.assert_close(output, expected)
    assert cache.num_tokens == 5
    assert chosen.num_tokens == 6


def test_under_autocast():
    block, tokens = randomised(torch.float32), some_tokens(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = step_by_step(block, tokens, 1)
        expected = block(tokens, mask=Causal())
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected, atol=0.05, rtol=0.05)


def test_decoding_256_tokens_computes_256_rows():
    block = MultiHeadAttention(64, 4).eval()
    tokens = torch.randn(1, 256, 64)
    cache = block.new_cache(1, 256)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    work = {}
    for name in ("cached", "recomputed"):
        counter = FlopCounterMode(display=False, custom_mapping={attention: _attention_work})
        with torch.no_grad(), counter:
            for end in range(1, 257):
                if name == "cached":
                    output = block(tokens[:, end - 1 : end], cache=cache)
                else:
                    expected = block(tokens[:, :end], mask=Causal())[:, -1:]
        torch.testing.assert_close(output, expected if name != "cached" else output)
        work[name] = counter.get_flop_counts()["Global"][attention]
    # Σ n² over Σ n
    assert work["recomputed"] / work["cached"] == pytest.approx(171, abs=1)


def _attention_work(query, key, value, *args, out_shape=None, **kwargs):
    """Multiply-adds of both products, counted twice, as torch counts them."""
    batch, heads, queries, dim = query
    return 2 * batch * heads * queries * key[2] * (dim + value[3])


def test_what_it_refuses():
    block, tokens = randomised(), some_tokens()
    cache = block.new_cache(BATCH, 2)
    with pytest.raises(ValueError, match=r"cache: the key requires a gradient.*no_grad"):
        block(tokens[:, :1], cache=cache)
    with torch.no_grad():
        block(tokens[:, :1], cache=cache)
        with pytest.raises(ValueError, match="cache: has room for 2 tokens, got 2 after 1"):
            block(tokens[:, :2], mask=Causal("bottom_right"), cache=cache)
        with pytest.raises(ValueError, match=r"expected a key \[3, 5, 1, 4\].*got \[2, 5, 1, 4\]"):
            block(tokens[:2, :1], cache=cache)
        with pytest.raises(ValueError, match=r"of torch.float64, got .* of torch.float32"):
            block.float()(tokens[:, :1].float(), cache=cache)
        with pytest.raises(ValueError, match="cache: keeps the keys of self-attention"):
            block(tokens, tokens, cache=cache)
        with pytest.raises(ValueError, match="positions: not together with remembered keys"):
            block(tokens, block.remember(tokens.float()), positions=lambda q, k: (q, k))
        delta = randomised(normalizer="delta_rule")
        with pytest.raises(ValueError, match=r"fast weights by attnkit.delta_rule"):
            delta(tokens, mask=Causal(), cache=delta.new_cache(BATCH, TOKENS))
    assert cache.num_tokens == 1
    assert repr(cache) == "KeyValueCache(1 of 2 tokens, batch 3, 5 heads × 4)"
    assert KeyValueCache.of(cache.key, cache.value).num_tokens == 1


def test_normalizers_of_the_block():
    tokens = some_tokens()
    hard = randomised(normalizer="hard").train()
    torch.manual_seed(3)
    drawn = hard(tokens)
    assert not torch.equal(hard(tokens), drawn)
    assert torch.equal(hard.eval()(tokens), hard(tokens))
    weights = hard.attention_weights(tokens)
    assert set(weights.unique().tolist()) == {0.0, 1.0}
    delta = randomised(normalizer="delta_rule")
    beta = torch.sigmoid(tokens @ delta.normalizer.beta_proj.weight.T
                         + delta.normalizer.beta_proj.bias)  # fmt: skip
    heads = delta.project(tokens, tokens, tokens)
    expected = attnkit.attend(
        *heads, normalizer=attnkit.DeltaRule(beta.transpose(1, 2)), mask=Causal()
    )
    expected = delta.out_proj(expected.transpose(1, 2).flatten(2))
    torch.testing.assert_close(delta(tokens, mask=Causal()), expected)
    delta(tokens, mask=Causal()).sum().backward()
    assert all(parameter.grad is not None for parameter in delta.parameters())
    with pytest.raises(ValueError, match="softmax, hard, linear, delta_rule, a Normalizer or a"):
        randomised(normalizer="entmax")
    with pytest.raises(ValueError, match="the beta of DeltaRule belongs to one input"):
        randomised(normalizer=attnkit.DeltaRule(torch.ones(1, 1, 3)))
    assert isinstance(randomised(normalizer=Hard(None)).normalizer, Hard)


@pytest.mark.parametrize(("gate", "gates"), [("head", HEADS), ("elementwise", DIM)])
def test_gates_multiply_what_the_block_without_them_projects(gate, gates):
    block, tokens = randomised(gate=gate), some_tokens()
    without, seen = randomised(), []
    without.load_state_dict(block.state_dict(), strict=False)
    for one in (block, without):
        one.out_proj.register_forward_hook(lambda module, args, output: seen.append(args[0]))
        one(tokens)
    gate_of = torch.sigmoid(tokens @ block.gate_proj.weight.T + block.gate_proj.bias)
    torch.testing.assert_close(seen[0], seen[1] * gate_of.repeat_interleave(DIM // gates, -1))
