"""BLEU of captions."""

from __future__ import annotations

from math import exp
from typing import Any

from attnkit.metrics.captions import CaptionMetric, Tokens, check_n_gram, count_ngrams
from attnkit.metrics.tokenizers import Tokenizer

TINY, SMALL = 1e-15, 1e-9


class BLEU(CaptionMetric):
    """BLEU-n, from 0 to 1, as pycocoevalcap computes it.

        p_k  = (matches_k + 1e-15) / (k-grams_k + 1e-9)
        BLEU = (p_1 ⋯ p_n)^(1/n) · min(1, exp(1 − r / c))

    k-grams_k counts the k-grams of the predictions; a k-gram matches at most as often as in the
    reference that has it most often. c is the length of the predictions in tokens, r that of the
    references closest in length to each, the shorter of two equally close. All are sums over the
    corpus, so BLEU is not the mean of its captions' scores.

    Papineni et al. 2002 (BLEU: a method for automatic evaluation of machine translation). The two
    small numbers are pycocoevalcap's: a corpus without a match gets almost 0 in place of 0, and
    perfect captions 1 − 1e-9 or so. `per_caption` is the same formula on one caption. There is
    no other smoothing, so that a caption without a common 4-gram has a BLEU-4 of almost 0.
    torchmetrics' `BLEUScore` is 0 if any k has no match, and equal to 1e-6 otherwise, unless two
    references are equally close in length: it takes the first.

    Args:
        n_gram: n, the longest n-grams that count.
        tokenizer, **kwargs: as in `CaptionMetric`, as are the errors.
    """

    plot_upper_bound = 1.0

    def __init__(self, n_gram: int = 4, tokenizer: Tokenizer = "whitespace", **kwargs: Any) -> None:
        super().__init__(tokenizer, **kwargs)
        check_n_gram(n_gram)
        self.n_gram = n_gram

    def score(
        self, predictions: list[Tokens], references: list[list[Tokens]]
    ) -> tuple[float, list[float]]:
        counts = [
            self._count(prediction, texts)
            for prediction, texts in zip(predictions, references, strict=True)
        ]
        total = [sum(column) for column in zip(*counts, strict=True)]
        return self._bleu(total), [self._bleu(each) for each in counts]

    def _count(self, prediction: Tokens, references: list[Tokens]) -> list[int]:
        """Return the lengths of prediction and closest reference, and matches and k-grams by k."""
        length = len(prediction)
        closest = min((abs(len(text) - length), len(text)) for text in references)[1]
        theirs = [count_ngrams(text, self.n_gram) for text in references]
        matches = [0] * self.n_gram
        for w, count in count_ngrams(prediction, self.n_gram).items():
            matches[len(w) - 1] += min(count, max(grams.get(w, 0) for grams in theirs))
        guesses = [max(0, length - order) for order in range(self.n_gram)]
        return [length, closest, *matches, *guesses]

    def _bleu(self, counts: list[int]) -> float:
        length, closest, *others = counts
        matches, guesses = others[: self.n_gram], others[self.n_gram :]
        product = 1.0
        for matched, guessed in zip(matches, guesses, strict=True):
            product *= (matched + TINY) / (guessed + SMALL)
        ratio = (length + TINY) / (closest + SMALL)
        return product ** (1 / self.n_gram) * (exp(1 - 1 / ratio) if ratio < 1 else 1.0)
