"""Decoders of words: parity with torch's, the papers' formulas, losses, the gradient of hard
attention; steps against all words at once are in test_generate."""

from itertools import product

import pytest
import torch
from layer_support import assert_named, assert_same, randomised
from torch import nn

import attnkit
from attnkit.interop import from_torch
from attnkit.models.captioning.recurrent_decoder import HardRecurrentDecoder, RecurrentDecoder
from attnkit.models.captioning.transformer_decoder import TransformerDecoder
from attnkit.models.captioning.word_decoder import PAD

BATCH, POSITIONS, WORDS, DIM, DEPTH, HEADS, VOCABULARY = 3, 7, 5, 12, 2, 3, 11
SCORES = ["additive", "general", "dot", "scaled_dot"]
SENTENCES = torch.tensor([[1, 5, 6, 2, 0], [1, 7, 2, 0, 0], [1, 8, 9, 10, 2]])
MASK = torch.arange(POSITIONS) < torch.tensor([7, 3, 5])[:, None]


def transformer(**options):
    options = {"dim": DIM, "depth": DEPTH, "num_heads": HEADS, **options}
    sizes = {"vocabulary_size": VOCABULARY, "max_words": WORDS}
    return randomised(TransformerDecoder(**{**sizes, **options}))


def recurrent(kind=RecurrentDecoder, **options):
    if options.get("score", "additive") == "additive":
        options = {"attention_dim": 5, **options}
    options = {"dim": DIM, "embedding_dim": 4, **options}
    return randomised(kind(VOCABULARY, WORDS, **options), 0.6)


def hard(**options):
    return recurrent(HardRecurrentDecoder, **options)


def a_memory(dim=DIM):
    return torch.randn(BATCH, POSITIONS, dim, dtype=torch.float64, requires_grad=True)


def some_words(length=WORDS):
    return torch.randint(3, VOCABULARY, (BATCH, length))


@pytest.mark.parametrize("mask", [None, MASK], ids=["", "masked"])
def test_equals_torchs_transformer(mask):
    layer = nn.TransformerDecoderLayer(
        DIM, HEADS, 4 * DIM, activation="gelu", batch_first=True, norm_first=True, dropout=0.0
    )
    theirs = randomised(nn.TransformerDecoder(layer, DEPTH, norm=nn.LayerNorm(DIM))).train()
    ours = transformer(positions=None, norm_eps=1e-5)
    ours.norm = theirs.norm
    own, others = [ours.embedding.weight], [ours.embedding.weight]
    for block, their in zip(ours.blocks, theirs.layers, strict=True):
        block.attention_norm, block.cross_norm, block.mlp_norm = (
            their.norm1,
            their.norm2,
            their.norm3,
        )
        block.mlp.fc1, block.mlp.fc2 = their.linear1, their.linear2
        block.attention = from_torch(their.self_attn)
        block.cross_attention = from_torch(their.multihead_attn)
        shared = [*their.norm1.parameters(), *their.norm2.parameters(), *their.norm3.parameters()]
        shared += [*their.linear1.parameters(), *their.linear2.parameters()]
        for mine, other in (
            (block.attention, their.self_attn), (block.cross_attention, their.multihead_attn),
        ):  # fmt: skip
            own += [mine.in_proj.weight, mine.in_proj.bias, *mine.out_proj.parameters()]
            others += [other.in_proj_weight, other.in_proj_bias, *other.out_proj.parameters()]
        own, others = own + shared, others + shared
    memory, words = a_memory(), some_words()
    hidden = nn.Transformer.generate_square_subsequent_mask(WORDS).double()
    expected = theirs(
        ours.embedding(words), memory, tgt_mask=hidden,
        memory_key_padding_mask=None if mask is None else ~mask,
    )  # fmt: skip
    expected = expected @ ours.embedding.weight.T
    logits = ours(memory, words, mask)
    assert_same(logits, expected, [memory, *own], [memory, *others], rtol=1e-7, atol=1e-7)


def scores_of(decoder, hidden, memory):
    """Of one state an item, [batch, positions], by the definitions of the papers."""
    attention = decoder.attention
    if attention.score_name == "additive":
        mixed = attention.query_proj(hidden)[:, None] + attention.key_proj(memory)
        return mixed.tanh() @ attention.additive.vector[0]
    if attention.score_name == "general":
        return torch.einsum("bi,ij,bpj->bp", hidden, attention.weight, memory)
    scale = DIM**-0.5 if attention.score_name == "scaled_dot" else 1.0
    return scale * torch.einsum("bi,bpi->bp", hidden, memory)


def by_hand(decoder, memory, words, mask=None, picked=None):
    """Logits, weights and, of positions that are picked [words], their log-probabilities."""
    there = torch.ones(memory.shape[:2]) if mask is None else mask
    there = there.double()[..., None]
    mean = (memory * there).sum(1) / there.sum(1)
    hidden, cell = decoder.first_hidden(mean).tanh(), decoder.first_cell(mean).tanh()
    logits, weights, log_p = [], [], []
    for place, word in enumerate(words.unbind(1)):
        scores = scores_of(decoder, hidden, memory).masked_fill(there[..., 0] == 0, -torch.inf)
        weight = scores.softmax(-1)
        weights.append(weight)
        if picked is None:
            context = torch.einsum("bp,bpc->bc", weight, memory)
        else:
            context = memory[:, picked[place]]
            log_p.append(weight[:, picked[place]].log())
        if decoder.gate is not None:
            context = decoder.gate(hidden).sigmoid() * context
        embedded = decoder.embedding.weight[word]
        hidden, cell = decoder.cell(torch.cat([embedded, context], -1), (hidden, cell))
        mixed = embedded + decoder.state_proj(hidden) + decoder.context_proj(context)
        logits.append(decoder.head(mixed))
    log_p = torch.stack(log_p, 1) if log_p else None
    return torch.stack(logits, 1), torch.stack(weights, 1), log_p


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("mask", [None, MASK], ids=["", "masked"])
def test_soft_attention_is_its_formula(score, gate, mask):
    decoder, memory, words = recurrent(score=score, gate=gate), a_memory(), some_words()
    expected, weights, _ = by_hand(decoder, memory, words, mask)
    wanted = [memory, *decoder.parameters()]
    assert_same(decoder(memory, words, mask), expected, wanted, rtol=1e-7, atol=1e-7)
    given = decoder.word_weights(memory, words, mask)
    assert given.shape == (BATCH, 1, 1, WORDS, POSITIONS)
    torch.testing.assert_close(given[:, 0, 0], weights)


def test_loss_is_the_mean_over_words():
    decoder, memory = transformer(label_smoothing=0.1), a_memory()
    log_p = decoder(memory, SENTENCES[:, :-1]).log_softmax(-1)
    picked = log_p.gather(2, SENTENCES[:, 1:, None])[..., 0]
    real = SENTENCES[:, 1:] != PAD
    terms = decoder.loss(memory, SENTENCES)
    torch.testing.assert_close(terms["loss"], -picked[real].mean())
    smoothed = -(0.9 * picked + 0.1 * log_p.mean(-1))[real].mean()
    torch.testing.assert_close(decoder.train().loss(memory, SENTENCES)["cross_entropy"], smoothed)


@pytest.mark.parametrize("mask", [None, MASK], ids=["", "masked"])
def test_doubly_stochastic_penalty(mask):
    decoder, memory = recurrent(doubly_stochastic=0.7), a_memory()
    terms = decoder.loss(memory, SENTENCES, mask)
    logits, weights, _ = by_hand(decoder, memory, SENTENCES[:, :-1], mask)
    real = SENTENCES[:, 1:] != PAD
    log_p = logits.log_softmax(-1).gather(2, SENTENCES[:, 1:, None])[..., 0]
    torch.testing.assert_close(terms["cross_entropy"], -log_p[real].mean())
    penalty = 0.0
    for item, position in product(range(BATCH), range(POSITIONS)):
        if mask is None or mask[item, position]:
            looked = weights[item, real[item], position].sum()
            penalty = penalty + (1 - looked) ** 2 / BATCH
    torch.testing.assert_close(terms["doubly_stochastic"], penalty)
    torch.testing.assert_close(terms["loss"], terms["cross_entropy"] + 0.7 * penalty)


def test_gradient_of_hard_attention_is_that_of_the_expected_loss():
    """Mean over many draws against the sum over all draws there are, for every parameter."""
    positions, many = 3, 4000
    decoder = hard(entropy=0.0, baseline_decay=0.0, dim=6).train()
    memory = torch.randn(1, positions, 6, dtype=torch.float64)
    words = torch.tensor([[1, 5, 6, 2]])
    parameters = dict(decoder.named_parameters())
    expected = 0.0
    for picked in product(range(positions), repeat=3):
        logits, _, log_p = by_hand(decoder, memory, words[:, :-1], picked=picked)
        loss = nn.functional.cross_entropy(logits[0], words[0, 1:])
        expected = expected + log_p.sum().exp() * loss
    exact = torch.autograd.grad(expected, parameters.values(), allow_unused=True)
    # one long batch is many draws
    decoder.baseline.fill_(1.7)
    samples = []
    for _ in range(20):
        terms = decoder.loss(memory.expand(many, -1, -1), words.expand(many, -1))
        decoder.baseline.fill_(1.7)
        samples.append(torch.autograd.grad(terms["loss"], parameters.values()))
    felt = 0
    for name, true, *estimates in zip(parameters, exact, *samples, strict=True):
        estimates = torch.stack(estimates)
        error = estimates.std(0) / len(estimates) ** 0.5
        assert ((estimates.mean(0) - true).abs() < 5 * error + 1e-9).all(), name
        felt += int("attention" in name and bool((true.abs() > 5 * error).any()))
    assert felt == 4, "the test is too blunt to feel the gradients of the attention"


def test_hard_attention_draws_in_training_and_takes_the_best_in_evaluation():
    decoder, memory, words = hard(entropy=0.3), a_memory(), some_words()
    assert set(decoder.loss(memory, words)) == {"loss", "cross_entropy"}
    weights = decoder.word_weights(memory, words)
    assert ((weights == 0) | (weights == 1)).all()
    assert (weights.sum(-1) == 1).all()
    decoder.train()
    drawn = [float(decoder.loss(memory, words)["cross_entropy"].detach()) for _ in range(8)]
    assert len({round(loss, 9) for loss in drawn}) > 1
    with pytest.raises(RuntimeError, match="record_draws"):
        decoder(memory, words)


def test_terms_of_hard_attention():
    """Of one position nothing is drawn: the terms are known."""
    decoder = hard(entropy=0.3, baseline_decay=0.75).train()
    torch.testing.assert_close(decoder.baseline, torch.tensor(VOCABULARY).double().log())
    before = decoder.baseline.clone()
    terms = decoder.loss(a_memory()[:, :1], some_words())
    for name in ("reinforce", "entropy"):
        torch.testing.assert_close(terms[name], torch.zeros_like(terms[name]))
    moved = 0.75 * before + 0.25 * terms["cross_entropy"]
    torch.testing.assert_close(decoder.state_dict()["baseline"], moved.detach())
    memory, words, baseline = a_memory(), some_words(), decoder.baseline.clone()
    torch.manual_seed(1)
    terms = decoder.loss(memory, words)
    expected = terms["cross_entropy"] + terms["reinforce"] - 0.3 * terms["entropy"]
    torch.testing.assert_close(terms["loss"], expected)
    torch.manual_seed(1)
    with attnkit.record_draws() as draws:
        logits = decoder(memory, words[:, :-1])
    losses = -logits.log_softmax(-1).gather(2, words[:, 1:, None])[..., 0]
    expected = sum(  # each draw by the losses of its word and of the later ones
        (losses[:, place:] - baseline).sum(1) * draw.log_probability.flatten()
        for place, draw in enumerate(draws)
    )
    torch.testing.assert_close(terms["reinforce"], expected.mean() / len(draws))


def test_dropout_in_training_only():
    decoder, memory, words = transformer(dropout_p=0.5), a_memory(), some_words()
    assert torch.equal(decoder(memory, words), decoder(memory, words))
    decoder.train()
    assert not torch.equal(decoder(memory, words), decoder(memory, words))
    with torch.no_grad():
        logits = [decoder.step(words[:, 0], decoder.start(memory)) for _ in range(2)]
    assert not torch.equal(*logits)


def test_parameters_that_do_not_decay():
    for positions, table in (
        ("learned", "position_table.table"),
        ("relative", "distance_bias.table"),
    ):
        assert transformer(positions=positions).no_weight_decay() == {"embedding.weight", table}
    untied = transformer(tie_embeddings=False)
    assert untied.head.weight is not untied.embedding.weight


def ran(memory, words, mask=None):
    mask = None if mask is None else torch.ones(mask, dtype=torch.bool)
    return transformer()(torch.zeros(memory).double(), torch.ones(words, dtype=torch.long), mask)


def started(**options):
    return transformer().start(a_memory(), **options)


WRONG = [
    (lambda: transformer(vocabulary_size=3), "vocabulary_size: expected at least 4, got 3"),
    (lambda: transformer(max_words=0), "max_words: expected at least 1, got 0"),
    (lambda: transformer(depth=0), "depth: expected at least 1, got 0"),
    (lambda: transformer(positions="learnt"), "positions: expected 'learned'.*None, got 'learnt'"),
    (lambda: transformer(label_smoothing=1.0), "label_smoothing: expected 0 <= .* < 1, got 1.0"),
    (lambda: transformer(num_heads=7), "num_heads: 7 does not divide dim 12"),
    (lambda: recurrent(score="cosine"), "score: expected 'additive'.*got 'cosine'"),
    (lambda: recurrent(score="dot", memory_dim=5), "score: 'dot' needs a state of the memory's 5"),
    (lambda: recurrent(doubly_stochastic=-1.0), "doubly_stochastic: expected at least 0, got -1.0"),
    (lambda: recurrent(attention_dim=0), "attention_dim: expected at least 1, got 0"),
    (lambda: recurrent(attention_dim=5, score="dot"), "only the score 'additive' has one, got 5"),
    (lambda: hard(entropy=-1.0), "entropy: expected at least 0"),
    (lambda: hard(baseline_decay=1.0), "baseline_decay: expected 0 <="),
    (lambda: ran((3, 7, 11), (3, 5)), r"memory: expected \[batch, .* 12\], got \[3, 7, 11\]"),
    (lambda: ran((3, 7, 12), (3, 6)), "words: expected at most max_words = 5, got 6"),
    (lambda: ran((3, 7, 12), (2, 5)), r"words: expected integers \[3, words\].*\[2, 5\]"),
    (lambda: ran((3, 7, 12), (3, 5), (3, 6)), r"memory_mask: expected booleans \[3, 7\].*\[3, 6\]"),
    (lambda: started(num_beams=2).expand(3), "num_beams: expected 1 to 2 from 1 .*, got 3 from 1"),
    (
        lambda: started(num_beams=2).select(torch.zeros(3, 2, dtype=torch.long)),
        r"beams: expected \[3, 1\], got \[3, 2\]",
    ),
    (lambda: started(max_words=6), "max_words: expected 1 to 5, got 6"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_named(call, message):
    assert_named(call, f"ValueError: .*{message}")
