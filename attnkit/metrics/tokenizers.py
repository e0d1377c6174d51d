"""From captions to tokens."""

from __future__ import annotations

import subprocess
import unicodedata
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Literal

from attnkit.metrics.java import require_java

Tokenizer = Literal["whitespace", "words", "ptb"] | Callable[[str], list[str]]


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raise where `tokenizer` is none, or cannot work here."""
    if tokenizer == "ptb":
        require_java('tokenizer="ptb"')
    elif tokenizer not in ("whitespace", "words") and not callable(tokenizer):
        raise ValueError(
            "tokenizer: expected 'whitespace', 'words', 'ptb' or a callable from a string to a "
            f"list of strings, got {tokenizer!r}"
        )


def tokenize(texts: list[str], tokenizer: Tokenizer) -> list[list[str]]:
    """The tokens of each text."""
    if tokenizer == "whitespace":
        return [text.split() for text in texts]
    if tokenizer == "words":
        return [_words(text) for text in texts]
    if tokenizer == "ptb":
        return _penn_treebank(texts)
    assert callable(tokenizer)
    tokens = [tokenizer(text) for text in texts]
    for each in tokens:
        # a string would be taken for a list of its characters
        if not isinstance(each, list) or not all(isinstance(token, str) for token in each):
            raise TypeError(f"tokenizer: expected it to return a list of strings, got {each!r}")
    return tokens


class _Plain(dict[int, str]):
    """For `str.translate`: punctuation and symbols, of any script, to a space."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = " " if unicodedata.category(character)[0] in "PS" else character
        return self[code]


_PLAIN = _Plain({ord("'"): "'", ord("’"): "'", ord("-"): "-"})


def _words(text: str) -> list[str]:
    """Lower case, without punctuation; apostrophes and hyphens stay inside words."""
    words = text.lower().translate(_PLAIN).replace("--", " ").split()
    return [word for word in (word.strip("'-") for word in words) if word]


def _penn_treebank(texts: list[str]) -> list[list[str]]:
    """What pycocoevalcap's `PTBTokenizer` makes of the texts, by the same Java program.

    Theirs writes a file beside its own code, which a read-only installation does not allow; here
    the program reads and writes pipes.
    """
    theirs = import_module("pycocoevalcap.tokenizer.ptbtokenizer")
    jar = Path(str(theirs.__file__)).with_name(theirs.STANFORD_CORENLP_3_4_1_JAR)
    program = "edu.stanford.nlp.process.PTBTokenizer"
    options = "-preserveLines", "-lowerCase", "-encoding", "UTF-8"
    lines = "".join(" ".join(text.split()) + "\n" for text in texts)
    done = subprocess.run(
        ["java", "-cp", str(jar), program, *options],
        input=lines.encode(),
        capture_output=True,
        check=False,
    )
    tokens = [line.split() for line in done.stdout.decode().split("\n")[:-1]]
    if done.returncode or len(tokens) != len(texts):
        raise RuntimeError(
            f"the PTB tokenizer made {len(tokens)} lines of {len(texts)}: {done.stderr.decode()}"
        )
    return [[token for token in line if token not in theirs.PUNCTUATIONS] for line in tokens]
