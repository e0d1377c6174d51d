"""torch's own modules: the weights that they return themselves, and their encoders."""

import pytest
import torch
from torch import nn

import attnkit
from attnkit.core.capture.watch import watch_attention

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 3, 5, 7, 12


def randomized(module):
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.eval()


MODULES = {
    "plain": {},
    "batch first": {"batch_first": True},
    "bias of keys": {"add_bias_kv": True},
    "a key of zeros": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
    "own sizes": {"kdim": 11, "vdim": 13},
    "no bias": {"bias": False},
}
FLOATS = torch.linspace(-1, 2, QUERIES * KEYS).view(QUERIES, KEYS)
MASKS = {
    "none": {},
    "boolean": {"attn_mask": torch.ones(QUERIES, KEYS).triu(3) > 0},
    "floats": {"attn_mask": FLOATS},
    "per head": {
        "attn_mask": FLOATS.expand(BATCH * HEADS, -1, -1) * torch.arange(6)[:, None, None]
    },
    "padding": {"key_padding_mask": torch.tensor([[False] * KEYS, [False] * 4 + [True] * 3])},
}
MASKS["two"] = MASKS["boolean"] | MASKS["padding"]


def inputs_of(module):
    sizes = ((QUERIES, DIM), (KEYS, module.kdim), (KEYS, module.vdim))
    torch.manual_seed(5)
    tensors = [torch.randn(BATCH, *size) for size in sizes]
    return tensors if module.batch_first else [tensor.transpose(0, 1) for tensor in tensors]


@pytest.mark.parametrize(("need_weights", "grad"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("name", "mask"), [*((name, "two") for name in MODULES), *(("plain", mask) for mask in MASKS)]
)
def test_the_weights_are_torchs(name, mask, grad, need_weights):
    module = randomized(nn.MultiheadAttention(DIM, HEADS, **MODULES[name]))
    query, key, value = inputs_of(module)
    if name in ("plain", "batch first"):
        value = key
    model = nn.ModuleList([module])
    with torch.set_grad_enabled(grad):
        _, expected = module(query, key, value, average_attn_weights=False, **MASKS[mask])
        with attnkit.record_backends() as record:
            output, average = module(query, key, value, need_weights=need_weights, **MASKS[mask])
        with (
            attnkit.record_backends() as outer,
            watch_attention(model) as calls,
            attnkit.capture_attention(model, rows=[3, -1], heads=1) as captured,
            attnkit.record_backends() as inner,
        ):
            again = module(query, key, value, need_weights=need_weights, **MASKS[mask])
    torch.testing.assert_close(again[0], output)
    if need_weights:
        torch.testing.assert_close(again[1], average)
    assert record.total() == outer.total() == inner.total()
    assert record.total().total() == 1
    (call,) = calls
    assert (call.layer, call.tap) == ("0", "multi_head_attention_forward")
    torch.testing.assert_close(call.weights(), expected.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(captured["0"][0], expected.detach()[:, [1]][:, :, [3, -1]])
    if grad:
        towards = torch.randn_like(again[0])
        (gradient,) = torch.autograd.grad((again[0] * towards).sum(), call.output)
        if not module.batch_first:
            towards = towards.transpose(0, 1)
        expected = (towards @ module.out_proj.weight).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        torch.testing.assert_close(gradient, expected)
        torch.testing.assert_close(call.weights() @ call.value, call.output)


def test_tokens_without_a_batch():
    module = randomized(nn.MultiheadAttention(DIM, HEADS))
    x = torch.randn(QUERIES, DIM)
    _, expected = module(x, x, x, average_attn_weights=False)
    with attnkit.capture_attention(module) as captured:
        module(x, x, x)
        module(x, x, x, need_weights=False)
    for weights in captured[""]:
        torch.testing.assert_close(weights[0], expected)


def test_dropout_is_left_out_of_the_weights_and_refused_in_gradients():
    module = randomized(nn.MultiheadAttention(DIM, HEADS, dropout=0.4, batch_first=True))
    x = torch.randn(BATCH, QUERIES, DIM)
    _, expected = module(x, x, x, average_attn_weights=False)
    module.train()
    for need_weights in (False, True):
        with watch_attention(module) as calls:
            module(x, x, x, need_weights=need_weights)
        torch.testing.assert_close(calls[0].weights(), expected)
        with pytest.raises(ValueError, match=r"the layer '' ran with dropout"):
            calls[0].weight_gradient(calls[0].output)


@pytest.mark.parametrize(("padded", "grad"), [(False, True), (True, False)])
def test_encoders_of_torch(padded, grad):
    layer = nn.TransformerEncoderLayer(DIM, 4, 17, batch_first=True)  # nested if even
    encoder = randomized(nn.TransformerEncoder(layer, 3))
    x = torch.randn(BATCH, KEYS, DIM)
    padding = torch.tensor([[False] * KEYS, [False] * 4 + [True] * 3]) if padded else None
    real = torch.ones(BATCH, KEYS, dtype=torch.bool) if padding is None else ~padding
    with torch.set_grad_enabled(grad):
        expected = encoder(x, src_key_padding_mask=padding)
        with attnkit.capture_attention(encoder) as captured:
            output = encoder(x, src_key_padding_mask=padding)
        torch.testing.assert_close(output[real], expected[real], atol=1e-5, rtol=1e-5)
        assert list(captured) == [f"layers.{place}.self_attn" for place in range(3)]
        tokens = x
        for module, (weights,) in zip(encoder.layers, captured.values(), strict=True):
            _, theirs = module.self_attn(
                tokens, tokens, tokens, key_padding_mask=padding, average_attn_weights=False
            )
            torch.testing.assert_close(weights, theirs.detach(), atol=1e-5, rtol=1e-4)
            tokens = module(tokens, src_key_padding_mask=padding)


def test_a_decoder_attends_to_itself_and_to_the_memory():
    layer = randomized(nn.TransformerDecoderLayer(DIM, HEADS, 17, batch_first=True))
    tokens, memory = torch.randn(BATCH, QUERIES, DIM), torch.randn(BATCH, KEYS, DIM)
    causal = nn.Transformer.generate_square_subsequent_mask(QUERIES)
    with attnkit.capture_attention(layer) as captured:
        layer(tokens, memory, tgt_mask=causal, tgt_is_causal=True)
    assert captured["self_attn"][0].shape == (BATCH, HEADS, QUERIES, QUERIES)
    assert (captured["self_attn"][0].triu(1) == 0).all()
    assert captured["multihead_attn"][0].shape == (BATCH, HEADS, QUERIES, KEYS)
