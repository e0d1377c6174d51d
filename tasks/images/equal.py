"""Report files that are equal byte for byte."""

from collections.abc import Iterator, Mapping, Sequence

from attnkit.tasks.images.folder import shortened

_NAMED = 3


def equal_lines(
    paths: Mapping[str, Sequence[str]], labels: Mapping[str, Mapping[str, int]], firsts: list[int]
) -> Iterator[str]:
    """Yield lines about equal files, each with what to do.

    Args:
        paths: the files, by split.
        labels: maps a split to the classes by path.
        firsts: the result of `first_of_equal` for all files in order.
    """
    files = [(split, path) for split, of_split in paths.items() for path in of_split]
    pairs = [(files[first], files[n]) for n, first in enumerate(firsts) if first != n]
    across = [pair for pair in pairs if pair[0][0] != pair[1][0]]
    wrong = [(a, b) for a, b in pairs if labels[a[0]][a[1]] != labels[b[0]][b[1]]]
    if pairs:
        yield f"data: {_named(pairs)}; a split that is taken from train keeps them on one side"
    if across:
        yield (
            f"data: in two splits: {_named(across)}; remove them from one, or the test is of "
            "images that were trained on"
        )
    if wrong:
        yield f"data: under two labels: {_named(wrong)}; keep them under the right one"


def _named(pairs: Sequence[tuple[tuple[str, str], tuple[str, str]]]) -> str:
    count = f"{len(pairs)} {'file is' if len(pairs) == 1 else 'files are'} equal to others"
    return f"{count}: {', '.join(shortened([f'{b[1]} = {a[1]}' for a, b in pairs], _NAMED))}"
