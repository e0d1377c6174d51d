"""Tables of text, which results print."""

from collections.abc import Iterable, Sequence


def text_table(rows: Iterable[Sequence[object]], num_left: int = 1) -> str:
    """Rows of cells as lines, the columns two spaces apart.

    Args:
        rows: the heading first, all of the same length.
        num_left: how many columns, from the first on, stand at the left; the others at the right.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if place < num_left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
