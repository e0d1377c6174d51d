"""Weights on demand: equal to the definition, only what was asked, and nothing else changes."""

import pytest
import torch
from support import Largest

import attnkit
from attnkit import Causal, MultiHeadAttention, Padding, attention_weights
from attnkit.core import weights as weights_module

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 6, 5, 7, 8


@pytest.fixture
def query_key():
    return torch.randn(BATCH, HEADS, QUERIES, DIM), torch.randn(BATCH, 3, KEYS, DIM)


def expected_weights(query, key, mask, bias):
    scores = query @ key.repeat_interleave(2, dim=1).transpose(-2, -1) / DIM**0.5 + bias
    allowed = mask.dense(QUERIES, KEYS, query.device)
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)


@pytest.mark.parametrize("rows", [None, 2, -1, [4, 1], slice(1, 4), torch.tensor([3, 3])], ids=str)
@pytest.mark.parametrize("heads", [None, 5, [4, 0, 1], slice(None, 2)], ids=str)
@pytest.mark.parametrize("block", [1, 2**24])
def test_rows_and_heads(query_key, rows, heads, block, monkeypatch):
    monkeypatch.setattr(weights_module, "BLOCK_ELEMENTS", block)
    query, key = query_key
    mask = Causal("bottom_right") & Padding(torch.tensor([KEYS, 0]))
    bias = torch.randn(HEADS, QUERIES, KEYS)
    actual = attention_weights(query, key, mask=mask, bias=bias, rows=rows, heads=heads)
    everything = torch.arange(QUERIES), torch.arange(HEADS)
    picked_rows, picked_heads = (
        torch.atleast_1d(every if index is None else every[index])
        for every, index in zip(everything, (rows, heads), strict=True)
    )
    expected = expected_weights(query, key, mask, bias)[:, picked_heads][:, :, picked_rows]
    torch.testing.assert_close(actual, expected)
    assert (actual[1] == 0).all()


def test_weights_times_values_is_the_output(query_key):
    query, key = query_key
    value = torch.randn(BATCH, 3, KEYS, 11)
    weights = attention_weights(query, key, mask=Causal("top_left"))
    output = attnkit.attend(query, key, value, mask=Causal("top_left"))
    torch.testing.assert_close(weights @ value.repeat_interleave(2, dim=1), output)


def test_weights_have_gradients(query_key):
    query, key = (tensor.double().requires_grad_() for tensor in query_key)
    assert torch.autograd.gradcheck(
        lambda query, key: attention_weights(query, key, rows=[0, 3], heads=1), (query, key)
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rows": 5}, IndexError, "rows: there are 5, got 5"),
        ({"heads": [-7]}, IndexError, r"heads: there are 6, got \[-7\]"),
        ({"rows": [0.5]}, TypeError, "rows: expected an integer, a slice or integers"),
    ],
)
def test_wrong_indices(query_key, arguments, error, message):
    with pytest.raises(error, match=message):
        attention_weights(*query_key, **arguments)


def test_capture_computes_only_what_was_asked():
    tokens, heads = 509, 3
    block = MultiHeadAttention(3 * heads, heads).eval()
    x = torch.randn(2, tokens, 3 * heads)
    with Largest() as largest, attnkit.capture_attention(block, rows=0, heads=1) as captured:
        block(x)
    assert captured[""][0].shape == (2, 1, 1, tokens)
    assert largest.numel < tokens * tokens


class Stack(torch.nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.blocks = torch.nn.ModuleList(MultiHeadAttention(14, 2) for _ in range(depth))

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x, mask=mask)
        return x


def test_capture_leaves_output_kernel_and_training_as_they_are():
    model = Stack()
    x = torch.randn(2, 5, 14)
    expected = model(x, mask=Causal())
    with attnkit.record_backends() as record, attnkit.capture_attention(model) as captured:
        output = model(x, mask=Causal())
        output.sum().backward()
    assert torch.equal(output, expected)
    assert record.total() == {"flash": 3}
    assert list(captured) == ["blocks.0", "blocks.1", "blocks.2"]
    for weights in captured.values():
        (weights,) = weights
        assert weights.shape == (2, 2, 5, 5)
        assert not weights.requires_grad
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 5))
        assert (weights.triu(1) == 0).all()
    expected_first = model.blocks[0].attention_weights(x, mask=Causal())
    torch.testing.assert_close(captured["blocks.0"][0], expected_first)
    model(x)
    assert len(captured["blocks.0"]) == 1


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (None, ["blocks.0", "blocks.1", "blocks.2"]),
        (-1, ["blocks.2"]),
        ([0, "blocks.2"], ["blocks.0", "blocks.2"]),
        ("*", ["blocks.0", "blocks.1", "blocks.2"]),
    ],
    ids=str,
)
def test_capture_selects_layers(layers, names):
    model = Stack()
    with attnkit.capture_attention(model, layers=layers) as captured:
        model(torch.randn(2, 5, 14))
        model(torch.randn(1, 3, 14))
    assert list(captured) == names
    assert [weights.shape[-1] for weights in captured[names[0]]] == [5, 3]
    table = str(captured).splitlines()
    assert table[0].split() == ["layer", "calls", "weights"]
    assert table[1:] == [f"{name}      2  [2, 2, 5, 5], [1, 2, 3, 3]" for name in names]


def test_capture_refuses_what_is_not_there():
    for layers in (3, -4, "blok*"):
        with (
            pytest.raises(ValueError, match="is none of the 3 attention layers"),
            attnkit.capture_attention(Stack(), layers=layers),
        ):
            pass
    with (
        pytest.raises(ValueError, match=r"model: Linear has no .*replace_attention\(model\) first"),
        attnkit.capture_attention(torch.nn.Linear(3, 3)),
    ):
        pass
