"""What a page is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Table(NamedTuple):
    """Names of columns, and a sequence of cells for each row; None is an empty cell."""

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Section:
    """One thing that a page shows: an image, a sentence, a node.

    title: plain text, which becomes its heading and its entry in the list at the top.
    html: its body; names in it are escaped, images are data: URIs (`html.py` has both).
    data: what its script needs, of JSON's types.
    script: the behaviour that brings it to life, the name of a file in assets/; "" for none.
    """

    title: str
    html: str
    data: Mapping[str, Any] = field(default_factory=dict)
    script: str = ""
