"""Map values or colours of masks to classes, by a table or by the masks themselves."""

import csv
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from PIL import ImageColor

from attnkit.lightning.errors import UserError
from attnkit.tasks.images.folder import say_once, shortened
from attnkit.tasks.segmentation.sets import IGNORED

_NAMED = 3
_CLOSE = 10  # numbers up to this are classes even if most of them do not occur


class Classes(NamedTuple):
    """Maps values of a mask to classes.

    names: the names of the classes, in the order of their numbers.
    number_of: maps a value to the number of its class, or to 255 if its pixels do not count. A
        value is a number, or with `in_colours` 65536 · red + 256 · green + blue.
    """

    names: list[str]
    number_of: dict[int, int]
    in_colours: bool


def read_table(path: Path) -> tuple[list[tuple[str, int]], bool]:
    """Read names and values of classes, and whether the values are colours.

    Raises:
        UserError: the table does not have this form; the error names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"data.classes: {path} is not UTF-8; save it as UTF-8") from error
    if path.suffix == ".txt":
        lines = enumerate(text.splitlines())
        return [(name.strip(), n) for n, name in lines if name.strip()], False
    reader = csv.DictReader(StringIO(text), skipinitialspace=True)
    columns = {name.strip().lower(): name for name in reader.fieldnames or ()}
    in_colours = {"r", "g", "b"} <= columns.keys() or "color" in columns
    rows: list[tuple[str, int]] = []
    name_of: dict[int, str] = {}
    for number, row in enumerate(reader):
        where = f"data.classes: {path}, line {reader.line_num}"
        try:
            cells = {name: (row[column] or "").strip() for name, column in columns.items()}
            channels = [0]
            if "color" in columns:
                channels = list(ImageColor.getrgb(cells["color"])[:3])
            elif in_colours:
                channels = [int(cells[channel]) for channel in "rgb"]
            name = cells["name"]
            value = number if in_colours else int(cells.get("value", number))
        except (KeyError, ValueError) as error:
            raise UserError(
                f"{where}: expected the columns name, and r, g, b or color or value, got "
                f"{','.join(map(str, row.values()))}"
            ) from error
        if not 0 <= min(channels) <= max(channels) <= 255:
            raise UserError(f"{where}: expected channels from 0 to 255, got {channels}")
        value = packed(*channels) if in_colours else value
        if name_of.setdefault(value, name) != name:
            raise UserError(f"{where}: {name!r} has the same mask values as {name_of[value]!r}")
        rows.append((name, value))
    return rows, in_colours


def chosen_classes(
    rows: list[tuple[str, int]] | None,
    in_colours: bool,
    values: set[int],
    ignored: Sequence[int | str],
    known: Sequence[str] | None = None,
) -> Classes:
    """Return the classes of a table, or without a table those of the values in masks.

    Args:
        rows: names and values of the table; None: there is no table.
        in_colours: whether the values are colours.
        values: values in the masks of train, or in all masks if classes are `known`.
        ignored: names and numbers whose pixels do not count.
        known: classes of the module to be tested, if there is no table.

    Raises:
        UserError: fewer than 2 or more than 255 classes are left; there is no table, and masks hold
            colours or numbers far apart; or `ignored` holds neither a class nor a number.
    """
    out = {str(item) for item in ignored}
    is_binary = rows is None and (
        values == {0, IGNORED}
        if known is None
        else len(known) == 2 and {IGNORED} <= values <= {0, IGNORED}
    )
    if rows is None:
        rows = _without_table(values, out, known, is_binary)
    names = [*dict.fromkeys(name for name, _ in rows)]
    for item in sorted(out.difference(names)):
        if in_colours or not item.isdecimal():
            expected = "a class" if in_colours else "a class or a number"
            raise UserError(
                f"data.ignored: expected {expected}, got {item!r}; the classes are "
                f"{', '.join(shortened(names, 8))}"
            )
    kept = [(n, v) for n, v in rows if n not in out and (in_colours or str(v) not in out)]
    number_of_name = {n: at for at, n in enumerate(dict.fromkeys(n for n, _ in kept))}
    if not 2 <= len(number_of_name) <= IGNORED:
        raise UserError(
            f"data: expected 2 to {IGNORED} classes of pixels, got {len(number_of_name)}"
        )
    number_of = {} if in_colours or is_binary else {IGNORED: IGNORED}
    number_of |= {int(i): IGNORED for i in out if i.isdecimal()} if not in_colours else {}
    number_of |= {value: IGNORED for _, value in rows}
    number_of |= {value: number_of_name[name] for name, value in kept}
    return Classes([*number_of_name], number_of, in_colours)


def _without_table(
    values: set[int], out: set[str], known: Sequence[str] | None, is_binary: bool
) -> list[tuple[str, int]]:
    """Return names and values of the classes of masks without a table."""
    if is_binary:
        say_once("data: masks of 0 and 255 alone: 255 is a class")
        return list(zip(known or ("0", "1"), (0, IGNORED), strict=True))
    used = sorted(value for value in values if value != IGNORED and str(value) not in out)
    top = max(used, default=0)
    says = "a table says which class they are\n  data.classes=FILE.csv with the columns name, and"
    if top > IGNORED:
        raise UserError(f"data: a mask holds colours or numbers above 255; {says} r, g, b or value")
    if known is not None:  # names are numbers if the training had no table either
        numbers = all(name.isdecimal() for name in known)
        return [(name, int(name) if numbers else at) for at, name in enumerate(known)]
    if top > _CLOSE and 2 * sum(value <= top for value in values) < top + 1:
        seen = ", ".join(shortened([str(value) for value in used], _NAMED))
        raise UserError(f"data: masks hold {seen}: {says} value")
    return [(str(number), number) for number in range(top + 1)]


def packed(red: Any, green: Any, blue: Any) -> Any:
    """Return a colour as one number."""
    return red * 65536 + green * 256 + blue
