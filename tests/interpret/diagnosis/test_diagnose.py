"""`diagnose_attention` against closed forms, and against sums written out, on small models."""

import math

import pytest
import timm
import torch
from torch import nn

import attnkit
from attnkit import diagnose_attention
from attnkit.core.capture.watch import watch_attention
from attnkit.interpret.diagnosis import MEASURES, findings_of

BATCH, TOKENS, HEADS, DIM = 2, 13, 3, 5


class Attending(nn.Module):
    """Attention whose queries are the input and whose keys are the tokens of a basis."""

    def __init__(self, scale=1.0, mask=None):
        super().__init__()
        self.scale = scale
        self.mask = mask

    def forward(self, x):
        key = torch.eye(TOKENS).expand(len(x), HEADS, -1, -1)
        return attnkit.attend(x * self.scale, key, key, mask=self.mask, scale=1.0)


@pytest.fixture
def queries():
    torch.manual_seed(1)
    return torch.randn(BATCH, HEADS, TOKENS, TOKENS)


def values(diagnosis, name):
    return [row[name] for row in diagnosis.rows]


def close(given, expected):
    assert given == pytest.approx([expected] * len(given), abs=1e-5)


def test_uniform_attention(queries):
    diagnosis = diagnose_attention(Attending(scale=0.0), queries)
    assert [row["head"] for row in diagnosis.rows] == [0, 1, 2]
    close(values(diagnosis, "entropy"), 1)
    close(values(diagnosis, "sink"), 1 / TOKENS)
    close(values(diagnosis, "divergence"), 0)
    assert values(diagnosis, "static") == [None] * HEADS
    assert "entropy: 3 of 3 heads spread evenly" in str(diagnosis)


def test_attention_to_one_key():
    one = nn.functional.one_hot(torch.tensor([4, 7, 9]), TOKENS).float()
    query = 60 * one[None, :, None].expand(BATCH, -1, TOKENS, -1)
    diagnosis = diagnose_attention(Attending(), query)
    close(values(diagnosis, "entropy"), 0)
    close(values(diagnosis, "sink"), 1)
    close(values(diagnosis, "divergence"), 1)
    assert "sink: 3 of 3 heads give 50% or more of their attention to one key" in str(diagnosis)


def test_keys_alike_for_all_queries_are_static(queries):
    alike = queries[:, :, :1].expand(-1, -1, TOKENS, -1) + queries[..., :1]
    diagnosis = diagnose_attention(Attending(), alike)
    close(values(diagnosis, "static"), 1)
    assert "static: 3 of 3 heads rank the keys alike for every query" in str(diagnosis)
    assert max(values(diagnose_attention(Attending(), queries), "static")) < 0.3


@pytest.mark.parametrize("as_bias", [False, True])
def test_entropy_is_of_the_keys_that_a_row_may_see(queries, as_bias):
    class Masked(nn.Module):
        def forward(self, x):
            mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
            if as_bias:
                mask = torch.zeros(TOKENS, TOKENS).masked_fill(~mask, torch.finfo(x.dtype).min)
            return nn.functional.scaled_dot_product_attention(0 * x, x, x, attn_mask=mask)

    close(values(diagnose_attention(Attending(0.0, attnkit.Causal()), queries), "entropy"), 1)
    close(values(diagnose_attention(Masked(), queries), "entropy"), 1)


def test_measures_are_those_of_the_weights_in_blocks(queries, monkeypatch):
    """Sums over the whole matrix, of which blocks of one row are added."""
    monkeypatch.setattr("attnkit.interpret.head_measures.BLOCK_ELEMENTS", 1)
    diagnosis = diagnose_attention(Attending(), queries)
    weights = queries.softmax(dim=-1)
    entropy = torch.special.entr(weights).sum(-1).mean((0, 2)) / math.log(TOKENS)
    assert values(diagnosis, "entropy") == pytest.approx(entropy.tolist(), abs=1e-5)
    sink = weights.mean(dim=2).amax(dim=-1).mean(dim=0)
    assert values(diagnosis, "sink") == pytest.approx(sink.tolist(), abs=1e-5)


class Padded(nn.Module):
    """Looks at padding, unless it is told not to."""

    def __init__(self, heeds):
        super().__init__()
        self.heeds = heeds
        self.inner = Attending()

    def forward(self, x, attention_mask):
        lengths = attention_mask.sum(dim=1)
        self.inner.mask = attnkit.Padding(lengths) if self.heeds else None
        return self.inner(x)


def test_attention_on_padding(queries):
    real = torch.arange(TOKENS) < torch.tensor([[7], [11]])
    given = {"x": queries, "attention_mask": real.long()}
    diagnosis = diagnose_attention(Padded(heeds=True), given)
    assert values(diagnosis, "padding") == [0.0] * HEADS
    assert "look at padding" not in str(diagnosis)
    diagnosis = diagnose_attention(Padded(heeds=False), given)
    weights = queries.softmax(dim=-1)
    expected = [
        sum(float(weights[b, h, :n, n:].sum(-1).mean()) for b, n in enumerate((7, 11))) / 2
        for h in range(HEADS)
    ]
    assert values(diagnosis, "padding") == pytest.approx(expected, abs=1e-5)
    assert "padding: 3 of 3 heads look at padding, which must be 0" in str(diagnosis)
    diagnosis = diagnose_attention(Attending(), queries, real_tokens=real)
    assert values(diagnosis, "padding") == pytest.approx(expected, abs=1e-5)


def make_vit(**options):
    torch.manual_seed(2)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=(48, 80), depth=2, embed_dim=24, num_heads=3, **options
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def test_shares_and_distances_of_an_image_model():
    """3 x 5 patches behind a class token and two registers."""
    model, images = make_vit(reg_tokens=2), torch.randn(2, 3, 48, 80)
    diagnosis = diagnose_attention(model.train(), images)
    assert model.training
    with watch_attention(model.eval()) as calls, torch.no_grad():
        model(images)
    places = torch.cartesian_prod(torch.arange(3), torch.arange(5)).float()
    between = torch.cdist(places, places)
    for layer, call in enumerate(calls):
        weights = call.weights()
        prefix = weights[..., :3].sum(-1).mean((0, 2))
        patches = weights[:, :, 3:, 3:]
        distance = (patches * between).sum((0, 2, 3)) / patches.sum((0, 2, 3))
        rows = diagnosis.rows[3 * layer : 3 * layer + 3]
        assert {row["layer"] for row in rows} == {call.layer} == {f"blocks.{layer}.attn"}
        assert [row["prefix"] for row in rows] == pytest.approx(prefix.tolist(), abs=1e-5)
        assert [row["distance"] for row in rows] == pytest.approx(distance.tolist(), abs=1e-4)
    assert "grid: 3 x 5, as tokens depend on the image." in diagnosis.notes
    last = diagnose_attention(model, images, layers=-1)
    assert last.rows == diagnosis.rows[3:]


def test_tokens_of_a_high_norm_are_found():
    class Loud(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = attnkit.MultiHeadAttention(8, 2)

        def forward(self, x):
            self.inner(x, x, x)
            out = torch.ones_like(x)
            out[:, 4] = 4.1
            out[0, 7] = 3.9
            return out

    model = nn.Sequential(Loud())
    diagnosis = diagnose_attention(model, torch.randn(BATCH, TOKENS, 8))
    assert values(diagnosis, "high_norm") == pytest.approx([1 / TOKENS] * 2)


def test_what_is_drawn_is_said_and_is_the_same_each_time(queries):
    first, again = (diagnose_attention(Attending(), queries, num_rows=7) for _ in range(2))
    assert first.rows == again.rows
    assert "7 queries of each layer, drawn with the seed 0." in first.notes
    assert "divergence and static: of at most 7 queries" in str(first)
    other = diagnose_attention(Attending(), queries, num_rows=7, seed=1)
    assert other.rows != first.rows


def test_the_table_has_a_row_for_each_head_or_each_layer():
    model = make_vit()
    few = str(diagnose_attention(model, torch.randn(1, 3, 48, 80))).splitlines()
    assert few[0].split() == [
        "layer", "head", "entropy", "sink", "prefix", "distance", "divergence", "static",
        "high_norm",
    ]  # fmt: skip
    assert few[6].startswith("blocks.1.attn     2")
    for _ in range(6):
        model.blocks.extend(model.blocks[:3])
    many = diagnose_attention(model, torch.randn(1, 3, 48, 80))
    assert len(many.rows) == 3 * len(model.blocks) > 48
    assert "means over the heads of a layer" in str(many)
    assert not any(v != v for row in many.rows for v in row.values())
    assert {row["call"] for row in many.rows} > {0, 1}


def test_findings_are_at_most_five_sentences_each_with_its_number():
    row = {"layer": "blocks.1", "call": 0, "edge_type": None, "head": 2}
    row |= dict.fromkeys(MEASURES, 0.995) | {"static": 1.0, "divergence": 0.0}
    other = row | dict.fromkeys(MEASURES, 0.0)
    found = findings_of([row, other], 0.875, 0.75)
    starts = ["accuracy: 0.8750", "padding: 1 of 2", "static: 1 of 2", "entropy: 1 of 2", "sink: "]
    assert [len(starts)] * 2 == [len(found), sum(map(str.startswith, found, starts))]
    assert all(one.endswith("blocks.1 head 2; 0.995.") for one in found[1:2] + found[3:])
    assert findings_of([other]) == [
        "nothing stands out: no head is on padding, static, even or a sink."
    ]


QUERIES = torch.randn(2, HEADS, TOKENS, TOKENS)
BAD = [
    (nn.Linear(3, 3), torch.randn(2, 3), {}, "model: Linear has no attention"),
    (Attending(), 3, {}, "inputs: expected a tensor, a tuple of arguments or a dict"),
    (Attending(), torch.randn(0, 3), {}, "inputs: the batch is empty"),
    (Attending(), torch.randn(2, 3), {"grid": (1, 3)}, "grid: only images"),
    (Attending(), torch.randn(2, 3), {"num_rows": 1}, "num_rows: expected at least 2, got 1"),
    (Attending(), torch.randn(2, 3), {"seed": -1}, "seed: expected at least 0"),
    (Attending(), QUERIES, {"real_tokens": torch.ones(2, 7)},
     r"real_tokens: no attention ran over \[batch, tokens\] = \[2, 7\]"),
    (Attending(), QUERIES, {"labels": torch.ones(2, dtype=torch.long)},
     "labels: expected one for each row of the model's logits"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "inputs", "options", "message"), BAD)
def test_wrong_arguments_are_named(model, inputs, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        diagnose_attention(model, inputs, **options)


@pytest.mark.parametrize("num_words", [5, 6, 8])
def test_a_captioners_patches_lie_on_the_image_and_its_words_do_not(num_words):
    """Also where there are as many words as patches, 2 x 3, or with the 2 registers as tokens."""
    torch.manual_seed(0)
    encoder = attnkit.ViTEncoder(
        (16, 24), patch_size=8, dim=12, depth=2, num_heads=3, num_registers=2
    )
    decoder = attnkit.TransformerDecoder(23, 11, dim=12, depth=2, num_heads=3)
    captioner = attnkit.Captioner(encoder, decoder).eval()
    inputs = torch.randn(3, 3, 16, 24), torch.randint(3, 23, (3, num_words))
    found = {}
    for row in diagnose_attention(captioner, inputs).rows:
        found.setdefault(row["layer"], []).append((row["prefix"], row["distance"]))
    of_image = [layer for layer in found if layer.startswith("encoder.")]
    assert len(of_image) == 2
    alone = diagnose_attention(encoder, inputs[0]).rows
    for layer in of_image:
        own = [row for row in alone if layer.endswith(row["layer"])]
        assert found[layer] == [
            (pytest.approx(row["prefix"]), pytest.approx(row["distance"])) for row in own
        ]
        assert all(prefix > 0 and distance > 0 for prefix, distance in found[layer])
    assert found["decoder.blocks.0.attention"] == [(None, None)] * 3
    for prefix, distance in found["decoder.blocks.0.cross_attention"]:
        assert prefix in (0, None)  # places of tokens behind a whole encoder are not always known
        assert distance is None
