"""From captions to tokens, by each tokenizer."""

import pytest

from attnkit.metrics import BLEU, ROUGEL, CIDErD

TEXT = "A man’s DOG--it's 'big'!\tDon't, “café”: rock'n'roll… (black-and-white) 3.5 -- %日本。"
WORDS = "a man's dog it's big don't café rock'n'roll black-and-white 3 5 日 本"


@pytest.mark.parametrize(
    ("tokenizer", "tokens"),
    [
        ("whitespace", TEXT.split()),
        ("words", WORDS.split()),
        (str.splitlines, [TEXT]),
        (list, list(TEXT)),
    ],
)
def test_tokens(tokenizer, tokens):
    class Seen(BLEU):
        def score(self, predictions, references):
            assert predictions == [tokens, []]
            assert references == [[[], tokens], [tokens]]
            return 0.5, [0.5, 0.5]

    metric = Seen(tokenizer=tokenizer)
    metric.update([TEXT, ""], [["", TEXT], [TEXT]])
    assert metric.compute() == 0.5


def test_words_are_those_of_a_script_with_marks():
    """Vowel signs and the virama are neither letters nor punctuation."""
    metric = ROUGEL("words")
    metric.update(["हिन्दी में।"], [["हिन्दी"]])
    assert metric.compute().item() == pytest.approx((1 + 1.44) * 0.5 / (1 + 1.44 * 0.5))


@pytest.mark.parametrize("tokenizer", ["ptb3", None, 4])
def test_unknown(tokenizer):
    with pytest.raises(ValueError, match=r"tokenizer: expected 'whitespace', .* got "):
        CIDErD(tokenizer=tokenizer)


@pytest.mark.parametrize("tokenizer", [str.lower, lambda text: [1, 2], lambda text: None])
def test_a_callable_that_gives_no_list_of_strings(tokenizer):
    metric = ROUGEL(tokenizer)
    metric.update(["A b"], [["a b"]])
    with pytest.raises(TypeError, match="tokenizer: expected it to return a list of strings"):
        metric.compute()
