"""Files that are equal byte for byte, and whether files are those of a training."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from attnkit.tasks.images.folder import Files, shortened

_NAMED = 3
_SAMPLED = 256  # files of which a part is read, as equal pixels a side may make equal sizes
_SAMPLE = 4096  # bytes


def first_of_equal(paths: Sequence[str], sums: Tensor) -> list[int]:
    """Of each file the number of the first whose bytes are the same.

    Equal files have equal pixels, so that only those with the same sums are read once more.

    Args:
        paths: the files.
        sums: of the pixels of each, [files, 2, channels].
    """
    alike: dict[bytes, list[int]] = defaultdict(list)
    for number, row in enumerate(sums.flatten(1).numpy()):
        alike[row.tobytes()].append(number)
    firsts = list(range(len(paths)))
    for numbers in alike.values():
        seen: dict[object, int] = {}
        for number in numbers if len(numbers) > 1 else ():
            firsts[number] = seen.setdefault(_content(paths[number]), number)
    return firsts


def equal_lines(
    paths: Mapping[str, Sequence[str]], labels: Mapping[str, Mapping[str, int]], firsts: list[int]
) -> Iterator[str]:
    """What is to be known of equal files, and what to do, a line each.

    Args:
        paths: of the files, by split.
        labels: by split, path to class.
        firsts: of all files in turn what `first_of_equal` gives.
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


def fingerprint(splits: Mapping[str, Files]) -> str | None:
    """The same for the same training files, by names, sizes and samples; None: there are none.

    Args:
        splits: all that were given; without a test split, the files of train are other ones.
    """
    if not (train := splits.get("train", Files())).paths:
        return None
    root = os.path.commonpath([os.path.dirname(path) for path in train.paths])
    key = hashlib.sha256(repr(sorted(splits)).encode())
    for path in train.paths:
        with suppress(OSError):
            fact = f"\0{os.path.relpath(path, root)}\0{os.path.getsize(path)}"
            key.update(fact.encode(errors="surrogateescape"))
    for path in train.paths[:: 1 + len(train.paths) // _SAMPLED]:
        with suppress(OSError), open(path, "rb") as file:
            file.seek(os.path.getsize(path) // 2)
            key.update(file.read(_SAMPLE))
    return key.hexdigest()[:32]


def _content(path: str) -> object:
    content = Path(path).read_bytes()
    return len(content), hashlib.blake2b(content).digest()


def _named(pairs: Sequence[tuple[tuple[str, str], tuple[str, str]]]) -> str:
    count = f"{len(pairs)} {'file is' if len(pairs) == 1 else 'files are'} equal to others"
    return f"{count}: {', '.join(shortened([f'{b[1]} = {a[1]}' for a, b in pairs], _NAMED))}"
