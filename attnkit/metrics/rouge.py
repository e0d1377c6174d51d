"""ROUGE-L of captions."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

from attnkit.metrics.captions import CaptionMetric, Tokens

BETA = 1.2


class ROUGEL(CaptionMetric):
    """ROUGE-L, from 0 to 1, as pycocoevalcap computes it: the mean over captions of

        F = (1 + β²) P R / (R + β² P), β = 1.2
        P = max over references of LCS(prediction, reference) / |prediction|
        R = max over references of LCS(prediction, reference) / |reference|

    where LCS is the length of the longest common subsequence in tokens; 0 where nothing is common.
    P and R may come of different references.

    Lin 2004 (ROUGE: a package for automatic evaluation of summaries) has β as a parameter and
    takes the reference with the best F, as does torchmetrics' `ROUGEScore`, with β = 1. As in
    pycocoevalcap, a caption without tokens is one empty token: it is like an empty reference, and
    like nothing else. Where theirs is given captions with two spaces side by side, it has an empty
    token between them; here, as in all metrics, white space of any length parts two tokens.

    Args:
        tokenizer, **kwargs: as in `CaptionMetric`, as are the errors.
    """

    plot_upper_bound = 1.0

    def score(
        self, predictions: list[Tokens], references: list[list[Tokens]]
    ) -> tuple[float, list[float]]:
        scores = [
            _rouge(prediction or [""], [text or [""] for text in texts])
            for prediction, texts in zip(predictions, references, strict=True)
        ]
        return fmean(scores), scores


def _rouge(prediction: Tokens, references: list[Tokens]) -> float:
    common = _common_lengths(prediction, references)
    if not any(common):
        return 0.0
    precision = max(common) / len(prediction)
    recall = max(shared / len(text) for shared, text in zip(common, references, strict=True))
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def _common_lengths(first: Tokens, others: list[Tokens]) -> list[int]:
    """Return the length of the longest common subsequence with each of the others.

    A row of the usual table is one integer, in which a 0 at bit i means that the length grows by
    one at `first[i]` (Hyyrö 2004, Bit-parallel LCS-length computation revisited).
    """
    places: defaultdict[str, int] = defaultdict(int)
    for index, token in enumerate(first):
        places[token] |= 1 << index
    full = (1 << len(first)) - 1
    lengths = []
    for other in others:
        row = full
        for token in other:
            match = row & places.get(token, 0)
            row = ((row + match) | (row - match)) & full
        lengths.append(len(first) - row.bit_count())
    return lengths
