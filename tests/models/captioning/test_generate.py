"""Decoding: against exhaustive search and plain forwards, and what must change nothing."""

from itertools import product

import pytest
import torch
from support import with_third
from torch import nn
from torch.nn import functional as F

import attnkit
from attnkit.models.captioning.generate import generate, kept_by_sampling
from attnkit.models.captioning.recurrent_decoder import HardRecurrentDecoder, RecurrentDecoder
from attnkit.models.captioning.transformer_decoder import TransformerDecoder
from attnkit.models.captioning.word_decoder import END, PAD, START

BATCH, POSITIONS, WORDS, DIM, VOCABULARY = 3, 7, 4, 12, 6

DECODERS = {
    "learned": (TransformerDecoder, {"positions": "learned"}),
    "rotary": (TransformerDecoder, {"positions": "rotary"}),
    "relative": (TransformerDecoder, {"positions": "relative"}),
    "additive": (TransformerDecoder, {"score": "additive"}),
    "recurrent": (RecurrentDecoder, {}),
    "hard": (HardRecurrentDecoder, {"score": "general"}),
}
OTHERS = {
    "no positions": (TransformerDecoder, {"positions": None}),
    "sincos": (TransformerDecoder, {"positions": "sincos"}),
    "alibi": (TransformerDecoder, {"positions": "alibi"}),
    "additive, rotary": (TransformerDecoder, {"score": "additive", "positions": "rotary"}),
    "dot": (RecurrentDecoder, {"score": "dot"}),
    "hard, scaled_dot": (HardRecurrentDecoder, {"score": "scaled_dot"}),
}
METHODS = {
    "greedy": {},
    "beam": {"method": "beam", "num_beams": 3, "num_return": 2, "length_penalty": 0.8},
    "sample": {"method": "sample", "num_return": 2, "top_k": 4, "top_p": 0.9},
}


def made(name, vocabulary=VOCABULARY, words=WORDS):
    kind, options = (DECODERS | OTHERS)[name]
    if kind is TransformerDecoder:
        options = {**options, "depth": 2, "num_heads": 3}
    decoder = kind(vocabulary, words, dim=DIM, **options)
    torch.manual_seed(torch.initial_seed())  # whatever its own initialization draws
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.5)
    return decoder.double()


def a_memory():
    return torch.randn(BATCH, POSITIONS, DIM, dtype=torch.float64)


def a_mask():
    return torch.arange(POSITIONS) < torch.tensor([7, 3, 5])[:, None]


def seeded(*args, **options):
    if options.get("method") == "sample":
        options["generator"] = torch.Generator().manual_seed(3)
    return generate(*args, **options)


def log_probability(decoder, memory, words):
    """Of one sentence, where PAD and START are impossible."""
    before = torch.tensor([[START, *words[:-1]]])
    logits = decoder(memory[None], before)[0]
    logits[:, [PAD, START]] = -torch.inf
    return float(logits.log_softmax(-1)[range(len(words)), words].sum().detach())


def every_sentence():
    words = [word for word in range(VOCABULARY) if word not in (PAD, START, END)]
    for length in range(WORDS):
        for beginning in product(words, repeat=length):
            yield [*beginning, END]


@pytest.mark.parametrize("name", ["learned", "recurrent"])
@torch.no_grad()
def test_wide_beams_are_exhaustive(name):
    decoder = made(name).eval()
    memory = a_memory()
    likelihoods = [
        [(log_probability(decoder, one, words), words) for words in every_sentence()]
        for one in memory
    ]
    options = {"method": "beam", "num_beams": 120, "num_return": 5}
    for penalty, item in product((0.0, 0.6, 2.0, -1.0), range(BATCH)):
        if item == 0:
            found = generate(decoder, memory, length_penalty=penalty, **options)
        all_of_them = [
            (likelihood / ((5 + len(words)) / 6) ** penalty, words)
            for likelihood, words in likelihoods[item]
        ]
        best = sorted(all_of_them, reverse=True)[:5]
        for rank, (score, words) in enumerate(best):
            padded = words + [PAD] * (found.words.shape[2] - len(words))
            assert found.words[item, rank].tolist() == padded
            assert float(found.scores[item, rank]) == pytest.approx(score, abs=1e-10)


def test_narrow_beams_find_no_more_and_one_beam_is_greedy():
    some_end = some_are_beaten = False
    for seed in range(6):
        torch.manual_seed(seed)
        decoder, memory = made("learned", 29, 9), a_memory()
        decoder.head.bias = nn.Parameter(3.0 * F.one_hot(torch.tensor(END), 29).double())
        wide = generate(decoder, memory, method="beam", num_beams=50).scores
        narrow = [generate(decoder, memory, method="beam", num_beams=n) for n in (1, 3, 7)]
        assert all((found.scores <= wide + 1e-12).all() for found in narrow)
        greedy = generate(decoder, memory)
        assert torch.equal(narrow[0].words, greedy.words)
        torch.testing.assert_close(narrow[0].scores, greedy.scores)
        some_end |= bool((greedy.words == END).any())
        some_are_beaten |= not torch.allclose(narrow[0].scores, wide)
    assert some_end
    assert some_are_beaten


@pytest.mark.parametrize("name", DECODERS | OTHERS)
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_steps_are_plain_forwards_of_every_prefix(name, masked):
    """Also where hypotheses are chosen at random, some several times and some never."""
    decoder, memory, mask = made(name, 13, 9).eval(), a_memory(), a_mask() if masked else None
    if masked and isinstance(decoder, TransformerDecoder):
        mask[1] = False  # an item without a position
    state = decoder.start(memory, mask, num_beams=3)
    words = torch.full((BATCH, 1, 1), START)
    for length in range(1, 10):
        logits = decoder.step(words[..., -1].flatten(), state)
        beams = words.shape[1]
        there = None if mask is None else mask.repeat_interleave(beams, dim=0)
        plain = decoder(memory.repeat_interleave(beams, dim=0), words.flatten(0, 1), there)
        torch.testing.assert_close(logits, plain[:, -1])
        if length == 1:
            state.expand(3)
            words = words.expand(-1, 3, -1)
        else:
            chosen = torch.randint(3, (BATCH, 3))
            state.select(chosen)
            words = words.gather(1, chosen[..., None].expand(words.shape))
        words = torch.cat([words, torch.randint(END, 13, (BATCH, 3, 1))], dim=2)


@pytest.mark.parametrize(("name", "method", "masked"), with_third(DECODERS, METHODS, [False, True]))
@torch.no_grad()
def test_scores_are_those_of_one_plain_forward(name, method, masked):
    decoder, memory, mask = made(name, 13, 9).eval(), a_memory(), a_mask() if masked else None
    said = seeded(decoder, memory, memory_mask=mask, **METHODS[method])
    for rank in range(METHODS[method].get("num_return", 1)):
        words = said.words if said.words.ndim == 2 else said.words[:, rank]
        before = torch.cat([torch.full((BATCH, 1), START), words[:, :-1]], dim=1)
        logits = decoder(memory, before, mask)
        logits[..., [PAD, START]] = -torch.inf
        if method == "greedy":
            assert torch.equal(words, logits.argmax(-1).masked_fill(words == PAD, PAD))
        score = logits.log_softmax(-1).gather(2, words[..., None])[..., 0]
        score = score.masked_fill(words == PAD, 0.0).sum(1)
        if method == "beam":
            score /= ((5 + (words != PAD).sum(1)) / 6) ** METHODS["beam"]["length_penalty"]
        given = said.scores if said.scores.ndim == 1 else said.scores[:, rank]
        torch.testing.assert_close(given, score, check_dtype=False, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_an_item_alone_says_the_same(name, method):
    decoder, memory, mask = made(name, 13, 9), a_memory(), a_mask()
    together = generate(decoder, memory, memory_mask=mask, **METHODS[method])
    for item in range(BATCH):
        alone = generate(decoder, memory[item : item + 1, mask[item]], **METHODS[method])
        length = alone.words.shape[-1]
        assert torch.equal(together.words[item, ..., :length], alone.words[0])
        assert (together.words[item, ..., length:] == PAD).all()
        torch.testing.assert_close(together.scores[item], alone.scores[0])


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_weights_follow_the_hypothesis_that_survived(name, method):
    """Each sentence is said again, step by step, and what the steps looked at is seen."""
    decoder, memory = made(name, 13, 9).eval(), a_memory()
    said = seeded(decoder, memory, return_weights=True, **METHODS[method])
    words, weights = said.words, said.weights
    if words.ndim == 2:
        words, weights = words[:, None], weights[:, None]
    assert weights.shape[-2:] == (words.shape[2], POSITIONS)
    attention = "*attention" if "Recurrent" in type(decoder).__name__ else "*.cross_attention"
    sentences = words.flatten(0, 1)
    state = decoder.start(memory.repeat_interleave(words.shape[1], dim=0))
    with attnkit.capture_attention(decoder, layers=attention) as captured:
        for said_before in (torch.full_like(sentences[:, 0], START), *sentences.T[:-1]):
            decoder.step(said_before, state)
    seen = torch.stack([torch.cat(steps, dim=2) for steps in captured.values()], dim=1)
    is_word = (sentences != PAD)[:, None, None, :, None]
    torch.testing.assert_close(weights.flatten(0, 1), seen * is_word)


@pytest.mark.parametrize("method", METHODS)
def test_sentences_are_words_then_end_then_pad(method):
    decoder = made("learned", 13, 9).train()
    decoder.blocks[0].eval()
    before = [module.training for module in decoder.modules()]
    decoder.head.bias = nn.Parameter(torch.zeros(13).double())
    with torch.no_grad():
        decoder.head.bias[[PAD, START]] = 50.0
        decoder.head.bias[END] = 3.0
    said = seeded(decoder, a_memory(), **METHODS[method])
    for sentence in said.words.flatten(0, -2).tolist():
        end = sentence.index(END) if END in sentence else len(sentence)
        assert not {PAD, START} & set(sentence[:end])
        assert set(sentence[end + 1 :]) <= {PAD}
    assert END in said.words
    assert [module.training for module in decoder.modules()] == before


def test_sentences_that_never_end_are_cut():
    decoder = made("learned", 13, 9)
    decoder.head.bias = nn.Parameter(torch.zeros(13).double())
    with torch.no_grad():
        decoder.head.bias[END] = -1e4
    greedy = generate(decoder, a_memory(), max_words=6).words
    assert greedy.shape == (BATCH, 6)
    # what ends, at any price, comes before what does not
    found = generate(decoder, a_memory(), method="beam", num_beams=30, num_return=2, max_words=2)
    assert ((found.words == END).any(-1) == torch.tensor([True, False])).all()
    assert (found.scores[:, 0] < found.scores[:, 1]).all()
    with torch.no_grad():
        decoder.head.bias[END] = -torch.inf
    memory = a_memory()
    found = generate(decoder, memory, method="beam", num_beams=2, num_return=2, max_words=6)
    assert found.words.shape == (BATCH, 2, 6)
    assert (found.words > END).all()
    for item, rank in product(range(BATCH), range(2)):
        expected = log_probability(decoder.eval(), memory[item], found.words[item, rank].tolist())
        assert float(found.scores[item, rank]) == pytest.approx(expected)
    assert (found.scores[:, 0] >= found.scores[:, 1]).all()


def test_of_equal_words_the_lower_number_and_the_length_that_wins():
    """All words are as likely as all others, whatever came before."""
    decoder, memory = made("learned", 400, 5), a_memory()
    nn.init.zeros_(decoder.embedding.weight)
    found = generate(decoder, memory, method="beam", num_beams=3, num_return=3)
    # END is the likeliest sentence, and then what goes on from the lowest word
    expected = torch.tensor([[END, PAD, PAD], [3, END, PAD], [3, 3, END]])
    assert torch.equal(found.words, expected.expand(BATCH, -1, -1))
    assert torch.equal(generate(decoder, memory).words, torch.full((BATCH, 1), END))
    # by a large penalty the search goes on, since the longest sentence is the best
    decoder = made("learned")
    nn.init.zeros_(decoder.embedding.weight)
    found = generate(decoder, memory, method="beam", num_beams=4, length_penalty=8.0)
    assert torch.equal(found.words, torch.tensor([3, 3, 3, END]).expand(BATCH, -1))


def test_the_search_ends_when_nothing_can_win():
    decoder, memory = made("learned", 13, 9), a_memory()
    decoder.head.bias = nn.Parameter(6.0 * F.one_hot(torch.tensor(END), 13).double())
    calls, step = [], decoder.step
    decoder.step = lambda *args: (calls.append(1), step(*args))[1]
    for options in ({"method": "beam", "num_beams": 3}, {}):
        calls.clear()
        generate(decoder, memory, **options)
        assert len(calls) < 9


def test_samples_are_drawn_from_the_model():
    decoder, memory = made("recurrent", VOCABULARY, 2), a_memory()[:1]
    torch.manual_seed(1)
    said = generate(decoder, memory, method="sample", temperature=1.5, num_return=20000)
    first = said.words[0, :, 0].bincount(minlength=VOCABULARY) / 20000
    with torch.no_grad():
        logits = decoder.eval()(memory, torch.tensor([[START]]))[0, 0] / 1.5
    logits[[PAD, START]] = -torch.inf
    expected = logits.softmax(-1)
    assert ((first - expected).abs() < 5 * (expected * (1 - expected) / 20000).sqrt() + 1e-12).all()
    assert (said.scores.diff() <= 0).all()
    again = [
        generate(decoder, memory, method="sample", generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 5)
    ]
    assert torch.equal(again[0].words, again[1].words)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, None), (None, 0.7), (5, 0.7), (50, 1.0)])
def test_words_that_may_be_drawn(top_k, top_p):
    logits = torch.randn(7, 11, dtype=torch.float64)
    kept = kept_by_sampling(logits, top_k, top_p) > -torch.inf
    for row, is_kept in zip(logits, kept, strict=True):
        order = row.argsort(descending=True).tolist()[: top_k or 11]
        probabilities = row[order].softmax(-1).tolist()
        expected, mass = set(), 0.0
        for word, probability in zip(order, probabilities, strict=True):
            if mass >= (top_p or 2.0):
                break
            expected.add(word)
            mass += probability
        assert set(is_kept.nonzero().flatten().tolist()) == expected


WRONG = [
    ({"method": "best"}, "method: expected 'greedy', 'beam' or 'sample', got 'best'"),
    ({"num_beams": 3}, "num_beams: only for the method 'beam', got 3 with 'greedy'"),
    ({"length_penalty": 0.5}, "length_penalty: only for the method 'beam'"),
    ({"method": "beam", "temperature": 0.5}, "temperature: only for the method 'sample'"),
    ({"method": "beam", "top_k": 5}, "top_k: only for the method 'sample'"),
    ({"top_p": 0.5}, "top_p: only for the method 'sample'"),
    ({"generator": torch.Generator()}, "generator: only for the method 'sample'"),
    ({"num_return": 2}, "num_return: expected 1 or None with 'greedy', got 2"),
    ({"method": "beam", "num_beams": 0}, "num_beams: expected at least 1, got 0"),
    ({"method": "beam", "num_beams": 2, "num_return": 3}, "num_return: .* num_beams = 2, got 3"),
    ({"method": "sample", "temperature": 0.0}, "temperature: expected a positive number"),
    ({"method": "sample", "top_p": 1.5}, "top_p: expected 0 < top_p <= 1, got 1.5"),
    ({"method": "sample", "top_k": 0}, "top_k: expected at least 1, got 0"),
    ({"max_words": 5}, "max_words: expected 1 to 4, got 5"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        generate(made("learned"), a_memory(), **options)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("num_return", [None, 2])
def test_a_batch_of_nothing(name, num_return):
    decoder = made(name)
    memory = torch.randn(3, 5, DIM, dtype=torch.float64)
    for options in ({"method": "sample"}, {"method": "beam", "num_beams": 2}):
        options |= {"num_return": num_return, "return_weights": True}
        some, none = generate(decoder, memory, **options), generate(decoder, memory[:0], **options)
        assert none.scores.shape == (0, *some.scores.shape[1:])
        assert none.words.shape[:-1] == (0, *some.words.shape[1:-1])
        assert none.weights.shape[:-2] == (0, *some.weights.shape[1:-2])
        assert none.weights.shape[-1] == 5
    with pytest.raises(ValueError, match="memory: expected at least one position, got none"):
        generate(decoder, memory[:, :0])
    with pytest.raises(ValueError, match="words: expected at least START, got none"):
        decoder(memory, torch.ones(3, 0, dtype=torch.long))
    if name == "hard":  # draws a position, of which there must be one
        return
    words = torch.ones(0, 4, dtype=torch.long)
    loss = decoder.train().loss(memory[:0], words)["loss"]
    assert float(loss) == 0.0


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_more_beams_than_words(name, dtype):
    decoder = made(name).to(dtype)
    memory = torch.randn(2, 5, DIM, dtype=dtype)
    said = generate(decoder, memory, method="beam", num_beams=40, num_return=30, max_words=2)
    assert said.scores.dtype == torch.float32
    possible = torch.isfinite(said.scores)
    assert possible[:, 0].all()
    for words, there in zip(said.words, possible, strict=True):
        sentences = [tuple(row) for row in words[there].tolist()]
        assert len(set(sentences)) == len(sentences)
        assert not words[~there].any()
