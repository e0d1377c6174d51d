"""METEOR of captions, computed by its original Java program."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from attnkit.metrics.captions import CaptionMetric, Tokens
from attnkit.metrics.tokenizers import Tokenizer, require_java


class METEOR(CaptionMetric):
    """METEOR 1.5 for English, from 0 to 1, through pycocoevalcap and Java.

    A harmonic mean of precision and recall of aligned words, which may be equal, of one stem,
    synonyms or paraphrases, less a penalty for how the alignment is broken up. Its tables of
    stems, synonyms and paraphrases and its tuned parameters are part of the program, so it is run
    and not written again: Denkowski and Lavie 2014 (Meteor universal: language specific
    translation evaluation for any target language). The score of the corpus is of its sums, not
    the mean of its captions' scores.

    It needs pycocoevalcap (`pip install 'attnkit[coco]'`, about 100 MB), a `java` on the PATH, and
    up to 2 GB of memory. Java is started at each `compute` and `forward`, on each of several
    processes.

    Args:
        tokenizer, **kwargs: as in `CaptionMetric`; the tokens are then normalized by METEOR.

    Raises:
        RuntimeError: pycocoevalcap or Java is missing, at construction; the program fails.
    """

    plot_upper_bound = 1.0

    def __init__(self, tokenizer: Tokenizer = "whitespace", **kwargs: Any) -> None:
        super().__init__(tokenizer, **kwargs)
        require_java("METEOR")

    def score(
        self, predictions: list[Tokens], references: list[list[Tokens]]
    ) -> tuple[float, list[float]]:
        require_java("METEOR")  # it may have been pickled elsewhere
        program = import_module("pycocoevalcap.meteor.meteor").Meteor()
        try:
            return program.compute_score(
                {index: [_line(text) for text in texts] for index, texts in enumerate(references)},
                {index: [_line(text)] for index, text in enumerate(predictions)},
            )
        except (OSError, ValueError) as error:
            program.lock.release()  # or it could not be deleted
            program.meteor_p.kill()
            said = program.meteor_p.stderr.read().decode()
            raise RuntimeError(f"METEOR: the Java program failed: {said.strip()}") from error


def _line(tokens: Tokens) -> str:
    """Return the text in one line, without METEOR's separator |||."""
    return " ".join(" ".join(tokens).replace("|||", " ").split())
