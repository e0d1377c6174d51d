r"""Texts of others on a terminal and in a log: names of files, classes and columns.

They may hold what a terminal obeys (`\x1b]0;…`), what turns the order of letters around, or what no
encoding has (a file name that is not UTF-8).
"""

import re

# Controls, but for the end of a line and tab; the directions of writing; half of a pair of UTF-16.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""The text with what cannot be seen written out: `\x1b`, `\u202e`."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def in_line(text: str) -> str:
    r"""The same in one line: its ends are `\n`."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def cell(text: str) -> str:
    """A text in one line of a table of rich's."""
    from rich.markup import escape

    return escape(in_line(text))


def in_picture(text: str) -> str:
    """A text for matplotlib, which reads dollar signs as formulas."""
    return visible(text).replace("$", r"\$")
