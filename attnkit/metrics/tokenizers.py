"""Tokenizers of captions."""

from __future__ import annotations

import re
import shutil
import subprocess
import unicodedata
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Tokenizer = Literal["whitespace", "words", "ptb"] | Callable[[str], list[str]]


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raise an error if `tokenizer` is not a tokenizer, or cannot run here."""
    if tokenizer == "ptb":
        require_java('tokenizer="ptb"')
    elif tokenizer not in ("whitespace", "words") and not callable(tokenizer):
        raise ValueError(
            "tokenizer: expected 'whitespace', 'words', 'ptb' or a callable from a string to a "
            f"list of strings, got {tokenizer!r}"
        )


def tokenize(texts: list[str], tokenizer: Tokenizer) -> list[list[str]]:
    """Return the tokens of each text."""
    if tokenizer == "whitespace":
        return [text.split() for text in texts]
    if tokenizer == "words":
        return [words_of(text) for text in texts]
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
    """A table for `str.translate` that maps punctuation and symbols of any script to a space."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = " " if unicodedata.category(character)[0] in "PS" else character
        return self[code]


_PLAIN = _Plain({ord("'"): "'", ord("’"): "'", ord("-"): "-"})
# Scripts that put no spaces between words: Thai and Lao, Burmese, Khmer, Chinese and Japanese.
_SPACELESS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3031-\u3035"
    "\u303b-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
    "\U00020000-\U0003ffff]"
)
_DASHES = re.compile("['-]{2,}")
_JOINERS = "\u200c\u200d"  # zero-width (non-)joiners between letters, as in Persian and Hindi


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and symbols.

    Apostrophes and hyphens stay inside words: "dog's" and "t-shirt" are one each. Combining marks
    stay with their letters, and characters that can be written in several ways are the same (NFC).
    Chinese, Japanese, Thai, Lao, Khmer and Burmese have no spaces between words: there each
    character is a word, with the marks on it, as is usual in evaluating Chinese.

    >>> words_of("A dog's red ball!")
    ['a', "dog's", 'red', 'ball']
    >>> words_of("两只小狗")
    ['两', '只', '小', '狗']
    """
    plain = unicodedata.normalize("NFC", text.lower()).translate(_PLAIN)
    words = _DASHES.sub(" ", plain).split()
    if _SPACELESS.search(plain):
        words = [part for word in words for part in _characters(word)]
    # joiners and colour modifiers remain of emoji, and are no words
    return [word.strip("'-") for word in words if any(map(str.isalnum, word))]


def text_of(words: Iterable[str]) -> str:
    """Return the text of words, with a space between two unless neither script has spaces."""
    text = ""
    for word in words:
        apart = text and not (_is_spaceless(text[-1]) and _is_spaceless(word[0]))
        text += f" {word}" if apart else word
    return text


def _characters(word: str) -> list[str]:
    """Split off each character of a script without spaces, with its marks; keep other parts."""
    parts: list[str] = []
    is_whole = False
    for character in word:
        is_mark = unicodedata.category(character)[0] == "M" or character in _JOINERS
        is_alone = not is_mark and _is_spaceless(character)
        if parts and (is_mark or (is_whole and not is_alone)):
            parts[-1] += character
        else:
            parts.append(character)
            is_whole = not is_alone
    return parts


def _is_spaceless(character: str) -> bool:
    return _SPACELESS.match(character) is not None


def _penn_treebank(texts: list[str]) -> list[list[str]]:
    """Return the tokens of pycocoevalcap's `PTBTokenizer`, from the same Java program.

    `PTBTokenizer` writes a file beside its own code, which a read-only installation does not allow;
    here the program reads and writes pipes.
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


def require_java(what: str) -> None:
    """Raise an error if pycocoevalcap, which holds the programs, or Java is missing.

    Raises:
        RuntimeError: something is missing; the message names all of it.
    """
    missing = []
    if find_spec("pycocoevalcap") is None:
        missing.append("pycocoevalcap (pip install 'attnkit[coco]')")
    if shutil.which("java") is None:
        missing.append("Java (no `java` on the PATH)")
    if missing:
        raise RuntimeError(f"{what} needs {' and '.join(missing)}")
