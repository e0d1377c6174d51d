"""The base class of caption metrics, which stores captions of all ranks, and counts of n-grams."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from attnkit.metrics.tokenizers import Tokenizer, check_tokenizer, tokenize

Tokens = list[str]
NGram = tuple[str, ...]


class ScoredCaption(NamedTuple):
    """A prediction, its score, and its references."""

    score: float
    prediction: str
    references: list[str]


class CaptionMetric(Metric):
    """A score of predicted captions against references, over the whole corpus.

    `update(predictions, references)` takes captions and, for each, one or more references. The
    captions are stored unchanged as bytes and tokenised in `compute`, which runs over the captions
    of all processes. So statistics of the corpus, such as document frequencies, are right. All
    caption metrics have the same state, so that a `MetricCollection` stores it once for all
    tokenizers. `forward` scores its batch as if it were the corpus.

    A subclass defines `score(predictions, references)`, on tokens.

    Args:
        tokenizer: "whitespace": `str.split`; "words": lower case, punctuation and symbols off but
            for apostrophes and hyphens inside a word, and single characters of scripts that have no
            spaces, such as Chinese and Thai; "ptb": the Penn Treebank tokenizer of the COCO
            evaluation, through the extra `coco` and Java; or a callable from a string to a list of
            strings. `ptb` starts Java at each `compute`, so also at each `forward`.
        **kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: lists of different lengths, a caption without a reference, another tokenizer;
            in `compute`, no captions at all.
        TypeError: captions that are not strings, references that are not lists of them.
        RuntimeError: "ptb" without the extra `coco`, or without Java.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    plot_lower_bound = 0.0

    captions: list[Tensor] | Tensor  # JSON, a line for each caption

    def __init__(self, tokenizer: Tokenizer = "whitespace", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.add_state("captions", [], dist_reduce_fx="cat")

    @abstractmethod
    def score(
        self, predictions: list[Tokens], references: list[list[Tokens]]
    ) -> tuple[float, list[float]]:
        """Return the score of the corpus, and that of each prediction."""

    def update(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
        """Add captions to the corpus.

        Args:
            predictions: a caption for each image.
            references: a list of one or more references for each image.
        """
        _check(predictions, references)
        lines = [json.dumps([*pair]) + "\n" for pair in zip(predictions, references, strict=True)]
        if lines:
            text = bytearray("".join(lines), "ascii")  # JSON escapes other characters
            chunk = torch.frombuffer(text, dtype=torch.uint8).to(self.device)
            assert isinstance(self.captions, list)
            self.captions.append(chunk)

    def compute(self) -> Tensor:
        """Return the score of the corpus, a scalar, in float64 if the device supports it."""
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        return torch.tensor(self.score(*self._tokens())[0], dtype=dtype, device=self.device)

    def per_caption(self) -> list[ScoredCaption]:
        """Return each caption of the corpus with its own score, which sorts from worst to best.

        Captions are in the order of `update`, those of rank 0 first. With several processes, all
        must call it, and each gets the captions of all.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync):
            pairs = self._pairs()
            scores = self.score(*self._tokens())[1]
        return [ScoredCaption(score, *pair) for score, pair in zip(scores, pairs, strict=True)]

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Synchronize as `torchmetrics.Metric.sync` does."""
        # for a rank without captions, torchmetrics would send an empty float tensor, which cannot
        # be concatenated with the bytes of the others
        if not self._is_synced:
            self.captions = [self._bytes()]
        super().sync(*args, **kwargs)

    def _bytes(self) -> Tensor:
        chunks = [self.captions] if isinstance(self.captions, Tensor) else self.captions
        nothing = torch.zeros(0, dtype=torch.uint8, device=self.device)
        # set_dtype converts the bytes to floats, which represent them exactly
        return torch.cat([nothing, *(chunk.to(nothing) for chunk in chunks)])

    def _pairs(self) -> list[tuple[str, list[str]]]:
        lines = self._bytes().cpu().numpy().tobytes().splitlines()
        return [tuple(json.loads(line)) for line in lines]

    def _tokens(self) -> tuple[list[Tokens], list[list[Tokens]]]:
        pairs = self._pairs()
        if not pairs:
            raise ValueError(f"{type(self).__name__}: expected captions to score, got none")
        texts = [text for prediction, references in pairs for text in (prediction, *references)]
        tokens = iter(tokenize(texts, self.tokenizer))
        grouped = [[next(tokens) for _ in (prediction, *refs)] for prediction, refs in pairs]
        return [first for first, *_ in grouped], [others for _, *others in grouped]


def _check(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    _check_strings("predictions", predictions)
    if isinstance(references, str) or not isinstance(references, Sequence):
        raise TypeError(f"references: expected a list of lists of strings, got {references!r}")
    if len(predictions) != len(references):
        raise ValueError(
            f"references: expected a list for each of {len(predictions)} predictions, "
            f"got {len(references)}"
        )
    for index, texts in enumerate(references):
        _check_strings(f"references[{index}]", texts)
        if not texts:
            raise ValueError(f"references[{index}]: expected one string or more, got none")


def _check_strings(name: str, texts: Sequence[str]) -> None:
    sequence = isinstance(texts, Sequence) and not isinstance(texts, str)
    if not sequence or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name}: expected a list of strings, got {texts!r}")


def count_ngrams(tokens: Tokens, n_gram: int) -> Counter[NGram]:
    """Count each n-gram of 1 to `n_gram` tokens."""
    shifted = [tokens[start:] for start in range(n_gram)]
    return Counter(
        chain.from_iterable(zip(*shifted[:n], strict=False) for n in range(1, n_gram + 1))
    )


def check_n_gram(n_gram: int) -> None:
    if not isinstance(n_gram, int) or n_gram < 1:
        raise ValueError(f"n_gram: expected a positive integer, got {n_gram!r}")
