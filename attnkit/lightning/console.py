r"""Output on screen and in run.log: lines, texts of others made visible, numbers.

Names of files, classes and columns may hold what a terminal interprets (`\x1b]0;…`), what reverses
the order of letters, or what no encoding has (a file name that is not UTF-8).
"""

import logging
import math
import re
import sys
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

# Control characters except newline and tab; directions of writing; half of a pair of UTF-16.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
_PREFIXES = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}

log = logging.getLogger("attnkit.run")
"""Writes run.log; in a plain Trainer it has no handler."""


def say(text: str, *, error: bool = False) -> None:
    """Print a line on the screen (`error`: on stderr) and write it to run.log."""
    from rich import get_console  # here: every start of the command line imports this file
    from rich.console import Console

    # rich's own console puts the line above its progress bar; another would write into it
    console = Console(stderr=True) if error else get_console()
    console.print(visible(text), soft_wrap=True, highlight=False, markup=False, emoji=False)
    (sys.stderr if error else sys.stdout).flush()
    log.info("%s", text)


def say_table(table: "Table") -> None:
    """Print a table, at full width where there is no terminal, and write it to run.log."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)
    plain = StringIO()
    Console(file=plain, width=120, color_system=None).print(table)
    log.info("%s", f"\n{plain.getvalue()}")


def on_terminal() -> bool:
    """Whether a progress bar can be shown, in a terminal or a notebook; else lines replace it."""
    from rich.console import Console

    console = Console()
    return console.is_terminal or console.is_jupyter


# --- texts ----------------------------------------------------------------------------------------


def visible(text: str) -> str:
    r"""Return the text with invisible characters written out: `\x1b`, `\u202e`."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def in_line(text: str) -> str:
    r"""Return the text as `visible` does, in one line: its line ends are written `\n`."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def cell(text: str) -> str:
    """Return a text in one line, escaped for a table of rich."""
    from rich.markup import escape

    return escape(in_line(text))


def in_picture(text: str) -> str:
    """Return a text for matplotlib, which reads dollar signs as formulas."""
    return visible(text).replace("$", r"\$")


# --- numbers --------------------------------------------------------------------------------------


def three_digits(value: float, spread: float | None = None) -> str:
    """Format a number as `0.557`, `12.3` or `1.23e-05`, with a spread as `0.557 ± 0.012`."""
    if not math.isfinite(value):
        return str(value)
    exponent = _exponent(value)
    scale = 10.0**exponent if not -3 <= exponent < 5 else 1.0
    places = max(0, 2 - (exponent if scale == 1 else 0))
    texts = [f"{number / scale:.{places}f}" for number in (value, spread) if number is not None]
    text = " ± ".join(texts)
    if scale == 1:
        return text
    return f"{f'({text})' if spread is not None else text}e{exponent:+03d}"


def with_prefix(value: float) -> str:
    """Format a number as `115 k`, `2.35 M` or `41.5 G`."""
    for scale, prefix in _PREFIXES.items():
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.3g} {prefix}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """Format a duration as `18.3 ms`, `4.18 s`, `12 min 05 s` or `3 h 20 min`."""
    if value < 0.9995:
        return f"{three_digits(1e3 * value)} ms"
    if value < 99.95:
        return f"{three_digits(value)} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _exponent(value: float) -> int:
    """Return the exponent of the number rounded to three digits: 0 for 9.99, 1 for 9.999."""
    return int(f"{abs(value):.2e}".partition("e")[2]) if value else 0
