"""CIDEr and CIDEr-D of captions."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from math import exp, log, sqrt
from statistics import fmean
from typing import Any, NamedTuple

from attnkit.metrics.captions import CaptionMetric, NGram, Tokens, check_n_gram, count_ngrams
from attnkit.metrics.tokenizers import Tokenizer


class _Vector(NamedTuple):
    """A caption: the weights of its n-grams, and for each length of n-grams the norm of these."""

    weights: dict[NGram, float]
    norms: list[float]
    length: int


class CIDEr(CaptionMetric):
    """CIDEr, from 0 to 10: similarity to the references, in which rare n-grams count most.

        g_w(s) = count of w in s · (ln N − ln max(1, d_w))
        CIDEr  = 10 · mean over n-gram lengths and references r of cos(g(s), g(r))

    for each caption s, then the mean over the N captions. g is taken for each length of n-grams by
    itself, and d_w is how many of the N captions have the n-gram w in a reference of theirs. So a
    score depends on the whole corpus: that of N = 1 is 0, since ln 1 = 0, and the mean over parts
    is not the score of the whole. An n-gram in every caption's references has no weight.

    Vedantam, Zitnick and Parikh 2015 (CIDEr: Consensus-based Image Description Evaluation), as
    their code (github.com/vrama91/cider, folder `cider`) has it: words are not stemmed, as in the
    paper they are, and the factor 10, which the paper has in CIDEr-D only, is here too. What
    others report as "CIDEr", from pycocoevalcap or coco-caption, is not this but `CIDErD`.

    Args:
        n_gram: the longest n-grams that count.
        tokenizer, **kwargs: as in `CaptionMetric`, as are the errors.
    """

    plot_upper_bound = 10.0

    def __init__(self, n_gram: int = 4, tokenizer: Tokenizer = "whitespace", **kwargs: Any) -> None:
        super().__init__(tokenizer, **kwargs)
        check_n_gram(n_gram)
        self.n_gram = n_gram

    def score(
        self, predictions: list[Tokens], references: list[list[Tokens]]
    ) -> tuple[float, list[float]]:
        counts = [[count_ngrams(text, self.n_gram) for text in texts] for texts in references]
        frequencies = Counter(chain.from_iterable(set().union(*captions) for captions in counts))
        most = log(len(predictions))
        rarity = {w: most - log(frequency) for w, frequency in frequencies.items()}

        def vector(tokens: Tokens, counted: Counter[NGram]) -> _Vector:
            weights = {w: count * rarity.get(w, most) for w, count in counted.items()}
            squares = [0.0] * self.n_gram
            for w, weight in weights.items():
                squares[len(w) - 1] += weight * weight
            return _Vector(weights, [sqrt(square) for square in squares], len(tokens))

        scores = []
        for prediction, texts, captions in zip(predictions, references, counts, strict=True):
            ours = vector(prediction, count_ngrams(prediction, self.n_gram))
            theirs = map(vector, texts, captions)
            scores.append(10 * fmean(self._likeness(ours, caption) for caption in theirs))
        return fmean(scores), scores

    def _likeness(self, ours: _Vector, theirs: _Vector) -> float:
        """Return the similarity of two captions, the mean over lengths of n-grams."""
        products = [0.0] * self.n_gram
        for w, weight in ours.weights.items():
            if w in theirs.weights:
                products[len(w) - 1] += self._product(weight, theirs.weights[w])
        norms = zip(products, ours.norms, theirs.norms, strict=True)
        return fmean(product / (a * b) if product else 0.0 for product, a, b in norms)

    def _product(self, ours: float, theirs: float) -> float:
        return ours * theirs


class CIDErD(CIDEr):
    """CIDEr-D, from 0 to 10: CIDEr that does not rise with repeated words or length.

        CIDEr-D = 10 · mean over n-gram lengths and references r of
                  exp(−(|s| − |r|)² / 2σ²) · Σ_w min(g_w(s), g_w(r)) · g_w(r) / (‖g(s)‖ ‖g(r)‖)

    with g as in `CIDEr`, |·| the length in tokens and σ = 6. This is the "CIDEr" of pycocoevalcap,
    coco-caption, and so of nearly all papers since 2015, as it is the `ciderD` of
    github.com/vrama91/cider. Vedantam et al. 2015 clip shares of a caption's n-grams
    where this code clips their counts, so the two differ where |s| ≠ |r|.

    Args:
        n_gram: the longest n-grams that count.
        sigma: σ, in tokens.
        tokenizer, **kwargs: as in `CaptionMetric`, as are the errors.
    """

    def __init__(
        self,
        n_gram: int = 4,
        sigma: float = 6.0,
        tokenizer: Tokenizer = "whitespace",
        **kwargs: Any,
    ) -> None:
        super().__init__(n_gram, tokenizer, **kwargs)
        if not sigma > 0:
            raise ValueError(f"sigma: expected a positive number, got {sigma!r}")
        self.sigma = sigma

    def _likeness(self, ours: _Vector, theirs: _Vector) -> float:
        penalty = exp(-((ours.length - theirs.length) ** 2) / (2 * self.sigma**2))
        return penalty * super()._likeness(ours, theirs)

    def _product(self, ours: float, theirs: float) -> float:
        return min(ours, theirs) * theirs
