"""The largest logit of each head against the largest of all scores at once."""

import math

import pytest
import torch
from support import Largest
from torch import nn
from torch.nn import functional as F

import attnkit
from attnkit import Causal, Dense, Edges, Packed, Padding, Window, attend, record_logits

BATCH, HEADS, KV_HEADS, DIM, TOKENS = 2, 6, 3, 7, 13
SOME = torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) > 0.5
SOME[:, 2] = False  # a head that may look nowhere
MASKS = {
    "none": None,
    "causal": Causal(),
    "padding": Padding(torch.tensor([TOKENS, 0])),
    "window": Window(2, 0),
    "packed": Packed([5, 1, 7]) & Causal(),
    "dense": Dense(SOME),
    "edges": Edges(torch.tensor([[0, 1, 1, 2, 12], [0, 0, 1, 3, 3]]), TOKENS),
}


def make(tokens=TOKENS, **options):
    generator = torch.Generator().manual_seed(1)
    shapes = [(BATCH, h, tokens, DIM) for h in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator, **options) for shape in shapes]


@pytest.mark.parametrize("softcap", [None, 0.6])
@pytest.mark.parametrize("name", MASKS)
def test_they_are_the_largest_of_all(name, softcap):
    query, key, value = make(requires_grad=True)
    mask, bias = MASKS[name], torch.randn(1, HEADS, TOKENS, 1)
    scores = query @ key.repeat_interleave(2, 1).mT / math.sqrt(DIM)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores + bias
    if mask is not None:
        scores = scores.where(mask.dense(TOKENS, TOKENS, query.device), -math.inf)
    options = {"score": attnkit.ScaledDot(softcap=softcap), "mask": mask, "bias": bias}
    with record_logits() as logits:
        attend(query, key, value, **options, sink=torch.full((HEADS,), 99.0))
    assert not logits[""].requires_grad
    torch.testing.assert_close(logits, {"": scores.detach().amax((0, 2, 3))})


def test_what_edges_carry_counts():
    x, features = torch.randn(5, 4), torch.randn(5, 3)
    layer = attnkit.GraphAttention(4, 4, heads=2, edge_dim=3)
    with record_logits(layer) as logits, attnkit.capture_attention(layer):
        layer(x, MASKS["edges"].edge_index.clamp(max=4), features)
    (largest,) = logits.values()
    assert largest.shape == (2,)
    with record_logits(layer) as others:
        layer(x, MASKS["edges"].edge_index.clamp(max=4), 9 * features)
    assert (others[""] > largest).any()


def test_layers_by_name_and_the_largest_of_their_calls():
    block, theirs = attnkit.MultiHeadAttention(12, 3), nn.MultiheadAttention(12, 2)
    x = torch.randn(2, 5, 12)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.theirs = block, theirs

        def forward(self, x):
            return self.theirs(self.block(x), self.block(3 * x), x)[0]

    model, found = Model(), []
    for given in (x, 3 * x):
        with record_logits(block) as logits:
            block(given)
        found.append(logits[""])
    with record_logits(model) as logits:
        model(x)
    assert set(logits) == {"block", "theirs"}
    assert logits["theirs"].shape == (2,)
    torch.testing.assert_close(logits["block"], torch.maximum(*found))
    with record_logits(model) as logits:
        attnkit.MultiHeadAttention(12, 3)(x)  # none of the model's
    assert logits == {}


def test_nothing_of_queries_times_keys_is_held(monkeypatch):
    from attnkit.core.kernels import recompute

    monkeypatch.setitem(recompute.BLOCK_SCORES, "cpu", 2**14)
    tensors = make(tokens=601)
    with record_logits() as logits, Largest() as largest:
        attend(*tensors, mask=Window(3, 0))
    assert largest.numel < BATCH * HEADS * 601 * 601 / 10
    scores = tensors[0] @ tensors[1].repeat_interleave(2, 1).mT / math.sqrt(DIM)
    allowed = Window(3, 0).dense(601, 601, scores.device)
    expected = scores.where(allowed, -math.inf).amax((0, 2, 3))
    torch.testing.assert_close(logits[""], expected)


def test_attention_that_is_not_seen_is_an_error():
    class Own(nn.Module):
        def forward(self, x):
            return F.softmax(x @ x.mT, dim=-1) @ x

    model = nn.Sequential(Own())
    message = "model: 0 computes attention by functions of its own, whose logits are not seen"
    with pytest.raises(ValueError, match=message), record_logits(model):
        model(torch.randn(2, 5, 3))


@pytest.mark.parametrize("num_heads", [1, 2])
def test_several_numbers_of_heads_under_one_name_are_refused(num_heads):
    x = torch.randn(1, 4, 5, 3)
    few = x[:, :num_heads]
    message = f"model: \\(the model\\) computes attention of 4 heads and of {num_heads}"
    with record_logits():
        attend(x, x, x)
        with pytest.raises(ValueError, match=message):
            attend(few, few, few)
