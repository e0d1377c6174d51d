"""The Transformer decoder: parity with torch's, steps against all at once, masks, losses."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnkit.models.captioning.transformer_decoder import TransformerDecoder
from attnkit.models.captioning.word_decoder import PAD

BATCH, POSITIONS, WORDS, DIM, DEPTH, HEADS, VOCABULARY = 3, 7, 5, 12, 2, 3, 11
KINDS = [None, "learned", "sincos", "rotary", "alibi", "relative"]


def made(**options) -> TransformerDecoder:
    decoder = TransformerDecoder(
        VOCABULARY, WORDS, **{"dim": DIM, "depth": DEPTH, "num_heads": HEADS, **options}
    )
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.4)
    return decoder.double().eval()


def a_memory(dim=DIM, **options):
    return torch.randn(BATCH, POSITIONS, dim, dtype=torch.float64, **options)


def some_words(length=WORDS):
    return torch.randint(3, VOCABULARY, (BATCH, length))


def a_mask():
    return torch.arange(POSITIONS) < torch.tensor([7, 3, 5])[:, None]


@pytest.mark.parametrize("masked", [False, True])
def test_equals_torch(masked):
    layer = nn.TransformerDecoderLayer(
        DIM, HEADS, 4 * DIM, activation="gelu", batch_first=True, norm_first=True, dropout=0.0
    )
    theirs = nn.TransformerDecoder(layer, DEPTH, norm=nn.LayerNorm(DIM)).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.4)
    ours = made(positions=None, norm_eps=1e-5)
    pairs = {"norm": theirs.norm}
    for number, (block, their) in enumerate(zip(ours.blocks, theirs.layers, strict=True)):
        assert block is ours.blocks[number]
        pairs |= {
            f"blocks.{number}.attention_norm": their.norm1,
            f"blocks.{number}.cross_norm": their.norm2,
            f"blocks.{number}.mlp_norm": their.norm3,
            f"blocks.{number}.attention.out_proj": their.self_attn.out_proj,
            f"blocks.{number}.cross_attention.out_proj": their.multihead_attn.out_proj,
            f"blocks.{number}.mlp.fc1": their.linear1,
            f"blocks.{number}.mlp.fc2": their.linear2,
        }
    wanted = {}
    for name, module in pairs.items():
        wanted |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
    for number, their in enumerate(theirs.layers):
        for name, attention in (
            ("attention", their.self_attn),
            ("cross_attention", their.multihead_attn),
        ):
            wanted[f"blocks.{number}.{name}.in_proj.weight"] = attention.in_proj_weight
            wanted[f"blocks.{number}.{name}.in_proj.bias"] = attention.in_proj_bias
    table = ours.embedding.weight.detach()
    given = {"embedding.weight": table, "head.weight": table}
    for name, tensor in wanted.items():  # cross-attention has its own layer for each of the three
        if "cross_attention.in_proj" in name:
            for part, one in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                given[name.replace("in_proj", f"{part}_proj")] = one
        else:
            given[name] = tensor
    ours.load_state_dict(given)
    memory, words = a_memory(requires_grad=True), some_words()
    hidden = nn.Transformer.generate_square_subsequent_mask(WORDS).double()
    expected = theirs(
        F.embedding(words, table),
        memory,
        tgt_mask=hidden,
        memory_key_padding_mask=~a_mask() if masked else None,
    )
    expected = expected @ table.T
    logits = ours(memory, words, a_mask() if masked else None)
    torch.testing.assert_close(logits, expected)
    named = dict(ours.named_parameters())
    parts = {
        name: [named[name]] if name in named else
        [named[name.replace("in_proj", f"{part}_proj")] for part in ("query", "key", "value")]
        for name in wanted
    }  # fmt: skip
    logits.square().sum().backward()
    theirs_of = torch.autograd.grad(expected.square().sum(), [memory, *wanted.values()])
    ours_of = [torch.cat([part.grad for part in parts[name]]) for name in wanted]
    for our, their in zip([memory.grad, *ours_of], theirs_of, strict=True):
        torch.testing.assert_close(our, their)


@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_steps_equal_all_at_once(positions, masked):
    decoder = made(positions=positions, memory_dim=10)
    memory, words = a_memory(10), some_words()
    mask = a_mask() if masked else None
    if masked:
        mask[1] = False  # an item without a position
    logits = decoder(memory, words, mask)
    state = decoder.start(memory, mask)
    steps = [decoder.step(word, state) for word in words.unbind(1)]
    torch.testing.assert_close(torch.stack(steps, dim=1), logits)


@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("score", ["scaled_dot", "additive"])
@torch.no_grad()
def test_hypotheses_remember_their_own_past(positions, score):
    """Whatever survives, each says what it would have said alone."""
    decoder, beams = made(positions=positions, score=score), 3
    memory = a_memory()
    state = decoder.start(memory, num_beams=beams)
    first = some_words(1)[:, 0]
    decoder.step(first, state)
    state.expand(beams)
    pasts = first.repeat_interleave(beams)[:, None]
    for step in range(WORDS - 1):
        if step:
            chosen = torch.randint(beams, (BATCH, beams))
            state.select(chosen)
            pasts = pasts[(torch.arange(BATCH)[:, None] * beams + chosen).flatten()]
        words = torch.randint(3, VOCABULARY, (BATCH * beams,))
        logits = decoder.step(words, state)
        pasts = torch.cat([pasts, words[:, None]], dim=1)
        expected = decoder(memory.repeat_interleave(beams, dim=0), pasts)[:, -1]
        torch.testing.assert_close(logits, expected)


@torch.no_grad()
def test_padding_of_the_memory_and_later_words_change_nothing():
    decoder = made()
    memory, words = a_memory(), some_words()
    logits = decoder(memory, words)
    longer = torch.cat([memory, 1e3 * a_memory()], dim=1)
    mask = (torch.arange(2 * POSITIONS) < POSITIONS).expand(BATCH, -1)
    torch.testing.assert_close(decoder(longer, words, mask), logits)
    words[:, 3:] = PAD
    torch.testing.assert_close(decoder(memory, words)[:, :3], logits[:, :3])
    other = words.clone()
    other[1:] = some_words()[1:]
    torch.testing.assert_close(decoder(memory, other)[0], decoder(memory, words)[0])


@torch.no_grad()
def test_weights_are_those_of_the_cross_attention():
    decoder = made()
    memory, words = a_memory(), some_words()
    weights = decoder.word_weights(memory, words, a_mask())
    assert weights.shape == (BATCH, DEPTH, HEADS, WORDS, POSITIONS)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert (weights.masked_select(~a_mask()[:, None, None, None]) == 0).all()
    block = decoder.blocks[0]
    tokens = decoder.embedding(words) + decoder.position_table.table
    normed = block.attention_norm(tokens)
    tokens = tokens + block.attention(normed, mask=torch.ones(WORDS, WORDS).tril().bool())
    query, key, _ = block.cross_attention.project(block.cross_norm(tokens), memory, memory)
    scores = query @ key.mT / (DIM / HEADS) ** 0.5
    expected = scores.masked_fill(~a_mask()[:, None, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(weights[:, 0], expected)


def test_loss_is_the_mean_over_words():
    decoder = made(label_smoothing=0.1)
    memory = a_memory()
    words = torch.tensor([[1, 5, 6, 2, 0], [1, 7, 2, 0, 0], [1, 8, 9, 10, 2]])
    log_p = decoder(memory, words[:, :-1]).log_softmax(-1)
    picked = log_p.gather(2, words[:, 1:, None])[..., 0]
    real = words[:, 1:] != PAD
    terms = decoder.loss(memory, words)
    torch.testing.assert_close(terms["loss"], -picked[real].mean())
    smoothed = -(0.9 * picked + 0.1 * log_p.mean(-1))[real].mean()
    torch.testing.assert_close(decoder.train().loss(memory, words)["cross_entropy"], smoothed)


def test_dropout_in_training_only():
    decoder = made(dropout_p=0.5)
    memory, words = a_memory(), some_words()
    assert torch.equal(decoder(memory, words), decoder(memory, words))
    decoder.train()
    assert not torch.equal(decoder(memory, words), decoder(memory, words))
    with torch.no_grad():
        logits = [decoder.step(words[:, 0], decoder.start(memory)) for _ in range(2)]
    assert not torch.equal(*logits)


def test_parameters_that_do_not_decay():
    names = {"embedding.weight", "position_table.table"}
    assert made().no_weight_decay() == names
    assert made(positions="relative").no_weight_decay() == {
        "embedding.weight",
        "distance_bias.table",
    }
    untied = made(tie_embeddings=False)
    assert untied.head.weight is not untied.embedding.weight


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary_size": 3}, "vocabulary_size: expected at least 4, got 3"),
        ({"max_words": 0}, "max_words: expected at least 1, got 0"),
        ({"depth": 0}, "depth: expected at least 1, got 0"),
        ({"positions": "learnt"}, "positions: expected 'learned'.*or None, got 'learnt'"),
        ({"label_smoothing": 1.0}, "label_smoothing: expected 0 <= label_smoothing < 1, got 1.0"),
        ({"num_heads": 7}, "num_heads: 7 does not divide dim 12"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        TransformerDecoder(**{"vocabulary_size": 9, "max_words": 5, "dim": DIM, "num_heads": 3,
                              "depth": 1, **options})  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "words", "mask", "message"),
    [
        ((3, 7, 11), (3, 5), None, r"memory: expected \[batch, positions, 12\], got \[3, 7, 11\]"),
        ((3, 7, 12), (3, 6), None, "words: expected at most max_words = 5, got 6"),
        ((3, 7, 12), (2, 5), None, r"words: expected integers \[3, words\].*\[2, 5\]"),
        ((3, 7, 12), (3, 5), (3, 6), r"memory_mask: expected booleans \[3, 7\].*\[3, 6\]"),
    ],
)
def test_what_does_not_fit_is_named(memory, words, mask, message):
    mask = None if mask is None else torch.ones(mask, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        made()(torch.zeros(memory).double(), torch.ones(words, dtype=torch.long), mask)


def test_a_state_has_room_for_what_was_said():
    decoder = made()
    state = decoder.start(a_memory(), num_beams=2)
    with pytest.raises(
        ValueError, match="num_beams: expected 1 to 2 from 1 hypothesis, got 3 from 1"
    ):
        state.expand(3)
    with pytest.raises(ValueError, match=r"beams: expected \[3, 1\], got \[3, 2\]"):
        state.select(torch.zeros(3, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="max_words: expected 1 to 5, got 6"):
        decoder.start(a_memory(), max_words=6)
