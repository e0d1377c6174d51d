"""The recurrent decoders: the formula, its penalty, and the gradient of hard attention."""

from itertools import product

import pytest
import torch
from torch import nn

import attnkit
from attnkit.models.captioning.recurrent_decoder import HardRecurrentDecoder, RecurrentDecoder
from attnkit.models.captioning.word_decoder import PAD

BATCH, POSITIONS, WORDS, DIM, VOCABULARY = 3, 7, 5, 6, 11
SCORES = ["additive", "general", "dot", "scaled_dot"]


def made(kind=RecurrentDecoder, **options):
    if options.get("score", "additive") == "additive":
        options = {"attention_dim": 5, **options}
    options = {"embedding_dim": 4, **options}
    decoder = kind(VOCABULARY, WORDS, dim=DIM, **options)
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.6)
    return decoder.double().eval()


def a_memory(dim=DIM):
    return torch.randn(BATCH, POSITIONS, dim, dtype=torch.float64)


def some_words():
    return torch.randint(3, VOCABULARY, (BATCH, WORDS))


def a_mask():
    return torch.arange(POSITIONS) < torch.tensor([7, 3, 5])[:, None]


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
@pytest.mark.parametrize("masked", [False, True])
def test_soft_attention_is_its_formula(score, gate, masked):
    decoder = made(score=score, gate=gate)
    memory, words = a_memory().requires_grad_(), some_words()
    mask = a_mask() if masked else None
    expected, weights, _ = by_hand(decoder, memory, words, mask)
    logits = decoder(memory, words, mask)
    torch.testing.assert_close(logits, expected)
    given = decoder.word_weights(memory, words, mask)
    assert given.shape == (BATCH, 1, 1, WORDS, POSITIONS)
    torch.testing.assert_close(given[:, 0, 0], weights)
    wanted = [memory, *decoder.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(logits.square().sum(), wanted),
        torch.autograd.grad(expected.square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", [RecurrentDecoder, HardRecurrentDecoder])
@pytest.mark.parametrize("score", SCORES)
@torch.no_grad()
def test_steps_equal_all_at_once_and_hypotheses_their_past(kind, score):
    decoder, beams = made(kind, score=score), 2
    memory, words, mask = a_memory(), some_words(), a_mask()
    logits = decoder(memory, words, mask)
    state = decoder.start(memory, mask)
    torch.testing.assert_close(decoder.step(words[:, 0], state), logits[:, 0])
    state.expand(beams)
    both = torch.stack([words[:, 1], some_words()[:, 1]], dim=1)
    torch.testing.assert_close(decoder.step(both.flatten(), state)[::2], logits[:, 1])
    state.select(torch.tensor([[1, 0]] * BATCH))
    step = decoder.step(words[:, 2].repeat_interleave(beams), state)
    torch.testing.assert_close(step[1::2], logits[:, 2])


@torch.no_grad()
def test_padding_of_the_memory_changes_nothing():
    decoder = made()
    memory, words = a_memory(), some_words()
    longer = torch.cat([memory, 1e3 * a_memory()], dim=1)
    mask = (torch.arange(2 * POSITIONS) < POSITIONS).expand(BATCH, -1)
    torch.testing.assert_close(decoder(longer, words, mask), decoder(memory, words))


def test_what_each_step_looked_at_can_be_captured():
    decoder = made()
    memory, words = a_memory(), some_words()
    with attnkit.capture_attention(decoder) as captured:
        decoder(memory, words)
    weights = torch.cat(captured["attention"], dim=2)
    torch.testing.assert_close(weights, decoder.word_weights(memory, words)[:, 0])


@pytest.mark.parametrize("masked", [False, True])
def test_doubly_stochastic_penalty(masked):
    decoder = made(doubly_stochastic=0.7)
    memory, mask = a_memory(), a_mask() if masked else None
    words = torch.tensor([[1, 5, 6, 2, 0], [1, 7, 2, 0, 0], [1, 8, 9, 10, 2]])
    terms = decoder.loss(memory, words, mask)
    logits, weights, _ = by_hand(decoder, memory, words[:, :-1], mask)
    real = words[:, 1:] != PAD
    log_p = logits.log_softmax(-1).gather(2, words[:, 1:, None])[..., 0]
    torch.testing.assert_close(terms["cross_entropy"], -log_p[real].mean())
    penalty = 0.0
    for item in range(BATCH):
        for position in range(POSITIONS):
            if mask is None or mask[item, position]:
                looked = weights[item, real[item], position].sum()
                penalty = penalty + (1 - looked) ** 2 / BATCH
    torch.testing.assert_close(terms["doubly_stochastic"], penalty)
    torch.testing.assert_close(terms["loss"], terms["cross_entropy"] + 0.7 * penalty)


def test_gradient_of_hard_attention_is_that_of_the_expected_loss():
    """Mean over many draws against the sum over all draws there are, for every parameter."""
    positions, many = 3, 4000
    decoder = made(HardRecurrentDecoder, entropy=0.0, baseline_decay=0.0).train()
    memory = torch.randn(1, positions, DIM, dtype=torch.float64)
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
    decoder = made(HardRecurrentDecoder, entropy=0.3)
    memory, words = a_memory(), some_words()
    terms = decoder.loss(memory, words)
    assert set(terms) == {"loss", "cross_entropy"}
    weights = decoder.word_weights(memory, words)
    assert ((weights == 0) | (weights == 1)).all()
    assert (weights.sum(-1) == 1).all()
    decoder.train()
    drawn = {
        round(float(decoder.loss(memory, words)["cross_entropy"].detach()), 9) for _ in range(8)
    }
    assert len(drawn) > 1
    with pytest.raises(RuntimeError, match="record_draws"):
        decoder(memory, words)


def test_terms_of_hard_attention():
    """Of one position nothing is drawn: the terms are known."""
    decoder = made(HardRecurrentDecoder, entropy=0.3, baseline_decay=0.75).train()
    torch.testing.assert_close(decoder.baseline, torch.tensor(VOCABULARY).double().log())
    before = decoder.baseline.clone()
    terms = decoder.loss(a_memory()[:, :1], some_words())
    for name in ("reinforce", "entropy"):
        torch.testing.assert_close(terms[name], torch.zeros_like(terms[name]))
    moved = 0.75 * before + 0.25 * terms["cross_entropy"]
    torch.testing.assert_close(decoder.state_dict()["baseline"], moved.detach())
    terms = decoder.loss(a_memory(), some_words())
    expected = terms["cross_entropy"] + terms["reinforce"] - 0.3 * terms["entropy"]
    torch.testing.assert_close(terms["loss"], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "cosine"}, "score: expected 'additive'.*got 'cosine'"),
        ({"score": "dot", "memory_dim": 5}, "score: 'dot' needs a state of the memory's 5"),
        ({"doubly_stochastic": -1.0}, "doubly_stochastic: expected at least 0, got -1.0"),
        ({"attention_dim": 0}, "attention_dim: expected at least 1, got 0"),
        (
            {"attention_dim": 5, "score": "dot"},
            "only the score 'additive' has one, got 5",
        ),
        ({"kind": HardRecurrentDecoder, "entropy": -1.0}, "entropy: expected at least 0"),
        ({"kind": HardRecurrentDecoder, "baseline_decay": 1.0}, "baseline_decay: expected 0 <="),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)
