"""Tokenizers of captions: whole words, as in the papers, or byte-pair encoding."""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attnkit.core.arguments import at_least
from attnkit.lightning.errors import UserError
from attnkit.metrics.tokenizers import text_of, words_of
from attnkit.models.captioning.word_decoder import END, PAD, START, UNKNOWN

SPECIALS = ("<pad>", "<start>", "<end>", "<unknown>")


class Tokenizer(ABC):
    """Encodes text as token ids: 0 is padding, 1 the start, 2 the end, 3 an unknown word."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the size of the vocabulary, the four special tokens included."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a caption, without start and end."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text up to the first end, without padding and start."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the tokenizer as plain data, for a checkpoint; see `load_tokenizer`."""

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Tokenizer":
        """Return the tokenizer that `plain` describes; see `load_tokenizer`."""
        return load_tokenizer(plain)

    def pad(self, text: str, length: int) -> list[int]:
        """Return start, caption and end, padded to `length`; longer captions lose their end."""
        ids = self.encode(text)[: length - 2]
        return [START, *ids, END] + [PAD] * (length - 2 - len(ids))


class WordTokenizer(Tokenizer):
    """Tokenizer with an id for each word, lower case and without punctuation (see `words_of`).

    >>> tokenizer = WordTokenizer.build(["A dog runs.", "A dog."])
    >>> tokenizer.decode(tokenizer.encode("a dog sleeps"))
    'a dog <unknown>'

    Args:
        words: the words in the order of their ids, which start at 4.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._ids = {word: number for number, word in enumerate(self.words, len(SPECIALS))}
        if len(self._ids) < len(self.words):
            twice = Counter(self.words).most_common(1)[0][0]
            raise ValueError(f"words: expected different words, got {twice!r} twice")
        # vocabularies of versions up to 0.2 may hold the typographic apostrophe
        self._ids = {word.replace("’", "'"): n for word, n in self._ids.items()} | self._ids

    @classmethod
    def build(cls, captions: Iterable[str], min_count: int = 1) -> "WordTokenizer":
        """Build a tokenizer of the words that occur `min_count` times or more, frequent ones
        first."""
        at_least(1, min_count=min_count)
        counts = Counter(word for caption in captions for word in words_of(caption))
        kept = (word for word, count in counts.items() if count >= min_count)
        return cls(sorted(kept, key=lambda word: (-counts[word], word)))

    def to_dict(self) -> dict[str, Any]:
        return {"tokenizer": "words", "words": list(self.words)}

    def __len__(self) -> int:
        return len(SPECIALS) + len(self.words)

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(word, UNKNOWN) for word in words_of(text)]

    def decode(self, ids: Iterable[int]) -> str:
        names = (*SPECIALS, *self.words)
        return text_of(names[number] for number in _caption_ids(ids))


class BPETokenizer(Tokenizer):
    """Byte-pair encoding of lower-case text, by the library `tokenizers` (the extra `bpe`).

    Pairs of the most frequent neighbours are merged until there are `size` numbers (Sennrich et
    al., 2016), starting from bytes, so that no text is unknown and decoding restores every text
    except for capitals and spaces at its ends.

    Args:
        data: the JSON that `tokenizers.Tokenizer.to_str` returns.
    """

    def __init__(self, data: str) -> None:
        self.data = data
        try:
            self._tokenizer = _library().Tokenizer.from_str(data)
        except UserError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"data: not a tokenizer of the library tokenizers: {error}") from error

    @classmethod
    def build(cls, captions: Iterable[str], size: int = 8000, min_count: int = 2) -> "BPETokenizer":
        """Learn a tokenizer from captions; pairs that occur `min_count` times or more are
        merged."""
        at_least(len(SPECIALS) + 256, size=size)
        library = _library()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.normalizer = library.normalizers.Sequence(
            [library.normalizers.NFC(), library.normalizers.Lowercase()]
        )
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel()
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=min_count,
            special_tokens=list(SPECIALS),
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(captions, trainer)
        # A caption never contains special tokens: "<end>" in a text is encoded as five letters.
        plain = json.loads(tokenizer.to_str())
        plain["added_tokens"] = []
        return cls(json.dumps(plain, ensure_ascii=False))

    def to_dict(self) -> dict[str, Any]:
        return {"tokenizer": "bpe", "data": self.data}

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text.strip()).ids

    def decode(self, ids: Iterable[int]) -> str:
        kept = [number for number in _caption_ids(ids) if number != UNKNOWN]
        return self._tokenizer.decode(kept, skip_special_tokens=False).strip()


def load_tokenizer(plain: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that `plain`, the result of `to_dict`, describes.

    Raises:
        ValueError: `plain` is not the data of a tokenizer.
        UserError: the tokenizer needs the library `tokenizers`, which is not installed.
    """
    match plain:
        case {"tokenizer": "words", "words": words}:
            return WordTokenizer(words)
        case {"tokenizer": "bpe", "data": data}:
            return BPETokenizer(data)
    raise ValueError(
        f"vocabulary: expected what a tokenizer's to_dict() returns, got {str(plain)[:80]}"
    )


def _caption_ids(ids: Iterable[int]) -> Iterable[int]:
    """Yield the ids before the first end, without padding and start."""
    for number in map(int, ids):
        if number == END:
            return
        if number not in (PAD, START):
            yield number


def _library() -> Any:
    try:
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers  # noqa: F401
    except ImportError as error:
        raise UserError(
            "data.tokenizer: bpe needs the library tokenizers, which is not installed:\n"
            "pip install 'attnkit[bpe]'"
        ) from error
    return tokenizers
