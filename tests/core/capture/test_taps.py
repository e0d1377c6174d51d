"""The taps: what torch's function and ours are given, and the weights of it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import attnkit
from attnkit.core.capture.watch import watch_attention

BATCH, HEADS, QUERIES, KEYS, DIM, VALUE_DIM = 2, 6, 5, 7, 8, 11


def eager(query, key, bias=None, scale=None):
    """softmax(q kᵀ scale + bias), with as many key heads as query heads."""
    groups = query.shape[-3] // key.shape[-3]
    key = key.repeat_interleave(groups, dim=-3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return (scores if bias is None else scores + bias).softmax(dim=-1)


class Plain(nn.Module):
    """Code nobody here wrote: projections and torch's function, called as it likes."""

    def __init__(self, call):
        super().__init__()
        self.inner = nn.Module()
        self.call = call

    def forward(self, *tensors):
        return self.call(*tensors)


def bias_of(allowed):
    return torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)


HIDDEN = torch.ones(QUERIES, KEYS).tril(2) > 0
BIAS = torch.linspace(-2, 3, BATCH * HEADS * QUERIES * KEYS).view(BATCH, HEADS, QUERIES, KEYS)
CALLS = {
    "plain": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), None, None),
    "keywords": (
        lambda q, k, v: F.scaled_dot_product_attention(value=v, key=k, query=q, scale=0.3),
        None,
        0.3,
    ),
    "boolean mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, HIDDEN),
        bias_of(HIDDEN),
        None,
    ),
    "float mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=BIAS),
        BIAS,
        None,
    ),
    "causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.0, True),
        bias_of(torch.ones(QUERIES, KEYS).tril() > 0),
        None,
    ),
    "dropout": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), None, None),
}


@pytest.mark.parametrize("name", CALLS)
def test_torchs_function(name):
    call, bias, scale = CALLS[name]
    q, k = torch.randn(BATCH, HEADS, QUERIES, DIM), torch.randn(BATCH, HEADS, KEYS, DIM)
    v = torch.randn(BATCH, HEADS, KEYS, VALUE_DIM)
    with watch_attention(Plain(call)) as calls:
        F.scaled_dot_product_attention(q, k, v)
    with watch_attention(nn.Sequential(model := Plain(call))) as calls:
        output = model(q, k, v)
    (seen,) = calls
    assert (seen.layer, seen.tap) == ("0", "scaled_dot_product_attention")
    expected = eager(q, k, bias, scale)
    torch.testing.assert_close(seen.weights(), expected)
    torch.testing.assert_close(seen.weights([3, 0], -2), expected[:, [-2]][:, :, [3, 0]])
    assert torch.equal(seen.output, output)
    assert (seen.num_queries, seen.num_keys, seen.num_heads) == (QUERIES, KEYS, HEADS)


@pytest.mark.parametrize("shape", [(), (3,), (3, 2), (5, 3, 2)], ids=str)
def test_dimensions_of_torchs_function(shape):
    q, k, v = (torch.randn(*shape, n, d) for n, d in ((QUERIES, DIM), (KEYS, DIM), (KEYS, 11)))
    q.requires_grad_()
    mask = torch.rand(*shape, QUERIES, KEYS) > 0.3
    mask[..., 0] = True
    model = Plain(lambda *tensors: F.scaled_dot_product_attention(*tensors, mask))
    with watch_attention(model) as calls:
        output = model(q, k, v)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(q, k, v, mask))
    (seen,) = calls
    expected = (q @ k.mT * DIM**-0.5 + bias_of(mask)).softmax(dim=-1)
    torch.testing.assert_close(seen.weights().view_as(expected), expected)
    towards = torch.randn_like(output)
    (gradient,) = torch.autograd.grad((output * towards).sum(), seen.output)
    assert torch.equal(gradient.view_as(towards), towards)
    batch_and_heads = [(1, 1), (3, 1), (3, 2), (15, 2)][len(shape)]
    assert seen.weights().shape[:2] == batch_and_heads


def test_grouped_heads_and_broadcast_batches():
    q, k = torch.randn(BATCH, HEADS, QUERIES, DIM), torch.randn(BATCH, 3, KEYS, DIM)
    model = Plain(lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True))
    with watch_attention(model) as calls:
        model(q, k)
        model(q[0], k[0])
    torch.testing.assert_close(calls[0].weights(heads=[5, 1]), eager(q, k)[:, [5, 1]])
    torch.testing.assert_close(calls[1].weights()[0], eager(q, k)[0])
    model = Plain(lambda q, k: F.scaled_dot_product_attention(q, k, k))
    one = torch.randn(1, 1, KEYS, DIM)
    with watch_attention(model) as calls:
        model(q, one)
    torch.testing.assert_close(calls[0].weights(), (q @ one.mT * DIM**-0.5).softmax(dim=-1))


@pytest.mark.parametrize(("grouped", "backend"), [(True, "auto"), (False, "reference")])
def test_gradients_through_the_weights_without_the_weights(grouped, backend):
    q, k, v = (
        torch.randn(BATCH, heads, n, d, dtype=torch.float64, requires_grad=True)
        for heads, n, d in (
            (HEADS, QUERIES, DIM),
            (3 if grouped else HEADS, KEYS, DIM),
            (3 if grouped else HEADS, KEYS, VALUE_DIM),
        )
    )
    mask = attnkit.Causal("bottom_right") & attnkit.Padding(torch.tensor([KEYS, KEYS - 3]))
    towards = torch.randn(BATCH, HEADS, QUERIES, VALUE_DIM, dtype=torch.float64)
    model = Plain(lambda *tensors: attnkit.attend(*tensors, mask=mask, backend=backend).tanh())
    with watch_attention(model) as calls, attnkit.record_backends(model) as record:
        y = (model(q, k, v) * towards).sum()
    assert record.total() == {"reference" if backend == "reference" else "flash": 1}
    (call,) = calls
    assert (call.layer, call.tap) == ("", "attend")
    (output_gradient,) = torch.autograd.grad(y, call.output)
    weights = eager(q, k, bias_of(mask.dense(QUERIES, KEYS, q.device))).detach().requires_grad_()
    values = v.repeat_interleave(HEADS // v.shape[1], dim=1)
    (expected,) = torch.autograd.grad(((weights @ values).tanh() * towards).sum(), weights)
    torch.testing.assert_close(call.weights(), weights)
    torch.testing.assert_close(call.weight_gradient(output_gradient), expected)
    torch.testing.assert_close(
        call.weight_gradient(output_gradient, rows=[4, 1], heads=2), expected[:, [2]][:, :, [4, 1]]
    )
    r = torch.randn(BATCH, QUERIES, dtype=torch.float64)
    r[:, 2] = 0
    relevance = (expected * weights).relu().mean(dim=1)
    plain = weights.mean(dim=1)
    torch.testing.assert_close(call.propagate(r), (r[:, None] @ plain)[:, 0])
    torch.testing.assert_close(
        call.propagate(r, output_gradient=output_gradient), (r[:, None] @ relevance)[:, 0]
    )


def test_nothing_larger_than_a_block_is_made(monkeypatch):
    from support import Largest

    monkeypatch.setattr("attnkit.core.capture.calls.PROPAGATED_ELEMENTS", 4 * 3 * 211)
    x = torch.randn(1, 3, 211, DIM, requires_grad=True)
    model = Plain(lambda x: F.scaled_dot_product_attention(x, x, x))
    with watch_attention(model) as calls:
        y = model(x).square().sum()
    (gradient,) = torch.autograd.grad(y, calls[0].output)
    r = torch.rand(1, 211)
    with Largest() as largest:
        rows = calls[0].propagate(r, output_gradient=gradient)
    assert largest.numel < 2 * 3 * 211 * DIM
    everything = (calls[0].weights() * calls[0].weight_gradient(gradient)).relu().mean(dim=1)
    torch.testing.assert_close(rows, (r[:, None] @ everything)[:, 0])


class Stack(nn.Module):
    """Ours and torch's in turns, the last layer twice."""

    def __init__(self):
        super().__init__()
        self.ours = attnkit.MultiHeadAttention(14, 2)
        self.theirs = Plain(lambda x: F.scaled_dot_product_attention(x, x, x))
        self.last = attnkit.MultiHeadAttention(14, 2)

    def forward(self, x):
        return self.last(self.last(self.theirs(self.ours(x, mask=attnkit.Causal()))))


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (None, ["ours", "theirs", "last", "last"]),
        (-1, ["last", "last"]),
        ([0, "the*"], ["ours", "theirs"]),
        (-2, ["theirs"]),
        ([1, -1], ["theirs", "last", "last"]),
    ],
    ids=str,
)
def test_layers(layers, names):
    model = Stack()
    x = torch.randn(3, 5, 14)
    other = Stack()
    with attnkit.record_backends(model) as record:
        model(x)
    with (
        attnkit.record_backends(model) as watched,
        watch_attention(model, layers) as calls,
        watch_attention(nn.ModuleDict({"all": model})) as named,
    ):
        output = model(x)
        other(x)
    assert [call.layer for call in calls] == names
    assert [call.layer for call in named] == ["all.ours", "all.theirs", "all.last", "all.last"]
    assert watched.counts["theirs"] == record.counts["theirs"] != {}
    assert {name: counts for name, counts in watched.counts.items() if name} == record.counts
    assert torch.equal(output, model(x))


def test_layers_that_did_not_run():
    for layers in (3, -4, "blok*"):
        with (
            pytest.raises(ValueError, match="is none of the 3 attention layers that ran: ours, "),
            watch_attention(model := Stack(), layers),
        ):
            model(torch.randn(3, 5, 14))


def test_decoding_steps_are_seen():
    from attnkit.core.decode_step import attention_step

    block = attnkit.MultiHeadAttention(14, 2).eval()
    tokens = torch.randn(3, 5, 14)
    with torch.no_grad(), watch_attention(nn.ModuleDict({"block": block})) as calls:
        cache = block.new_cache(3, 5)
        for token in tokens.split(1, dim=1):
            attention_step(block, token, cache)
    assert [call.layer for call in calls] == ["block"] * 5
    whole = block.attention_weights(tokens, mask=attnkit.Causal())
    for step, call in enumerate(calls):
        torch.testing.assert_close(call.weights(), whole[:, :, step : step + 1, : step + 1])


def test_what_was_compiled_stays_compiled():
    block = attnkit.MultiHeadAttention(14, 2)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    x = torch.randn(3, 5, 14)
    expected = compiled(x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        with watch_attention(compiled) as calls:
            torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(compiled(x), expected)
    assert len(calls) == 1


def test_bad_arguments():
    x = torch.randn(BATCH, HEADS, QUERIES, DIM, requires_grad=True)
    model = Plain(lambda x, p: F.scaled_dot_product_attention(x, x, x, dropout_p=p))
    with watch_attention(model) as calls:
        model(x, 0.0)
        model(x, 0.3)
    plain, dropped = calls
    with pytest.raises(ValueError, match=r"r: expected \[batch, queries\] = \[2, 5\] for the"):
        plain.propagate(torch.ones(QUERIES))
    with pytest.raises(ValueError, match="output_gradient: expected the shape of the output"):
        plain.weight_gradient(x[:1])
    with pytest.raises(ValueError, match=r"ran with dropout, .* model.eval\(\) first"):
        dropped.propagate(torch.ones(BATCH, QUERIES), output_gradient=x)
    with pytest.raises(IndexError, match=r"^: rows: there are 5, got 5"):
        plain.weights(rows=QUERIES)
