"""What the words of a caption are."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w+(?:['’-]\w+)*")


def words_of(text: str) -> list[str]:
    """The words of a caption in lower case, without punctuation; "dog's" and "t-shirt" are one."""
    return _WORD.findall(text.lower())
