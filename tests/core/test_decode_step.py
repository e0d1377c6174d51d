"""A step of decoding is what the block computes, by another way or through its forward."""

import pytest
import torch
from torch import nn

import attnkit
from attnkit import MultiHeadAttention, Rotary1d, ScaledDot
from attnkit.core.decode_step import attention_step, memory_step

BATCH, BEAMS, KEYS, DIM, HEADS = 3, 2, 7, 20, 5

BLOCKS = {
    "plain": {},
    "no bias": {"bias": False, "out_bias": False},
    "other memory": {"key_dim": 11},
    "scale": {"score": ScaledDot(0.7)},
    "additive": {"score": "additive"},
    "softcap": {"score": ScaledDot(softcap=2.0)},
    "narrower values": {"value_head_dim": 2},
    "wider values": {"value_head_dim": 7},
    "grouped": {"num_kv_heads": 1},
    "qk_norm": {"qk_norm": True},
    "gate": {"gate": "head"},
    "hard": {"normalizer": "hard"},
    "reference": {"backend": "reference"},
}
PLAIN = {"plain", "no bias", "other memory", "scale"}


def made(options) -> MultiHeadAttention:
    block = MultiHeadAttention(DIM, HEADS, **options).double().eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    return block


def some(*shape):
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_memory_step_is_the_block(name, masked):
    block = made(BLOCKS[name])
    tokens, memory = some(BATCH, BEAMS, DIM), some(BATCH, KEYS, block.key_dim)
    bias = some(BATCH, 1, 1, KEYS).where(torch.rand(BATCH, 1, 1, KEYS) > 0.4, -torch.inf)
    bias[..., 0] = 0.0
    bias = bias if masked else None
    with attnkit.record_backends() as record:
        step = memory_step(block, tokens, block.remember(memory), bias=bias)
    assert ("step" in record.total()) == (name in PLAIN)
    torch.testing.assert_close(step, block(tokens, memory, bias=bias))


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "other memory"])
@pytest.mark.parametrize("rotated", [False, True])
@torch.no_grad()
def test_attention_steps_are_the_causal_block(name, rotated):
    block = made(BLOCKS[name])
    rotary = Rotary1d(DIM // HEADS, KEYS).double() if rotated else None
    tokens = some(BATCH, KEYS, DIM)
    cache = block.new_cache(BATCH, KEYS)
    steps = [
        attention_step(
            block, token, cache, positions=None if rotary is None else rotary.rotation(1, place)
        )
        for place, token in enumerate(tokens.split(1, dim=1))
    ]
    expected = block(tokens, mask=attnkit.Causal(), positions=rotary)
    torch.testing.assert_close(torch.cat(steps, dim=1), expected)


@pytest.mark.parametrize("hidden", [(BATCH, 1, 1, KEYS), (BATCH, 1, 1, 1), (KEYS,)])
@torch.no_grad()
def test_a_token_that_sees_nothing_gets_0(hidden):
    block = made({})
    tokens, memory = some(BATCH, BEAMS, DIM), some(BATCH, KEYS, DIM)
    bias = torch.full(hidden, -torch.inf, dtype=torch.float64)
    if len(hidden) > 1:
        bias[0] = 0.0
    step = memory_step(block, tokens, block.remember(memory), bias=bias)
    assert not step.isnan().any()
    torch.testing.assert_close(step, block(tokens, memory, bias=bias.view(-1, 1, 1, hidden[-1])))


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
@torch.no_grad()
def test_a_bias_that_is_a_mask_is_refused(dtype):
    block = made({})
    tokens, cache = some(BATCH, 1, DIM), block.new_cache(BATCH, KEYS)
    with pytest.raises(TypeError, match="bias: expected a floating-point tensor"):
        memory_step(
            block, tokens, block.remember(tokens), bias=torch.ones(BATCH, 1, 1, 1, dtype=dtype)
        )
    with pytest.raises(TypeError, match="bias: expected a floating-point tensor"):
        attention_step(block, tokens, cache, bias=torch.ones(1, 1, 1, 1, dtype=dtype))


def test_gradients_go_through_the_block():
    block = made({})
    tokens = some(BATCH, 1, DIM).requires_grad_()
    memory = some(BATCH, KEYS, DIM)
    step = memory_step(block, tokens, block.remember(memory))
    expected = block(tokens, memory)
    torch.testing.assert_close(step, expected)
    for ours, theirs in zip(
        *(torch.autograd.grad(y.square().sum(), [tokens, *block.parameters()])
          for y in (step, expected)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(ours, theirs)
