"""Files of more than 8 bits a channel: the range of values of a data set, and lines about it."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from attnkit.lightning.errors import UserError
from attnkit.tasks.images.decode import COLOURS, FLOATS, FOURTH_BAND, FULL_RANGES, INTEGERS, Depth

_TOPS = {INTEGERS: (255, 1023, 4095, 16383, 65535), FLOATS: (1, 255)}
_LOST = {
    COLOURS: "the upper 8 of them are read; files that use fewer bits are dark, convert them",
    FOURTH_BAND: "it is left out, be it near infrared or transparency",
}


def range_of(depths: Mapping[str, Depth]) -> list[float] | None:
    """Return the values that become 0 and 255, one range for a data set, from its training files.

    For integers the range is 0 to the largest number of 8, 10, 12, 14 or 16 bits, for floats 0 to 1
    or 255, if it contains all values; otherwise from the lowest to the highest value.

    Args:
        depths: maps a path to what 8 bits cannot hold of the file.

    Returns:
        [low, high], or None if no file is grey with more than 8 bits.

    Raises:
        UserError: some files hold integers and others floats, with different ranges.
    """
    ranges: dict[str, tuple[str, list[float]]] = {}
    for kind, tops in _TOPS.items():
        found = {path: depth for path, depth in depths.items() if depth[0] == kind}
        low = min((low for _, low, _ in found.values()), default=math.inf)
        high = max((high for _, _, high in found.values()), default=-math.inf)
        if high < low:
            continue
        slack = 0.01 if kind == FLOATS else 0.0  # tolerance for rounding errors
        fits = (t for t in tops if -slack * t <= low and high <= t * (1 + slack))
        top = next((t for t in fits if kind == INTEGERS or high > t / 4), None)
        bottom = min(0, low)
        observed = [bottom, high if high > bottom else 1.0]
        chosen: list[float] = observed if top is None else [0, top]
        ranges[kind] = next(iter(found)), chosen
    if len({tuple(chosen) for _, chosen in ranges.values()}) > 1:
        named = " and ".join(
            f"{path} holds {kind}, {_text(chosen)}" for kind, (path, chosen) in ranges.items()
        )
        raise UserError(
            f"data: {named}\n  bring them to one kind, or set data.value_range=[low,high]"
        )
    return next((chosen for _, chosen in ranges.values()), None)


def lines(
    split: str,
    depths: Mapping[str, Depth],
    value_range: Sequence[float] | None,
    *,
    brief: bool = False,
) -> Iterator[str]:
    """Yield a line for each kind of file of more than 8 bits that says how its values are mapped.

    Args:
        split: the split of the files, for the line.
        depths: maps a path to what 8 bits cannot hold of the file.
        value_range: see `Fit`.
        brief: leave out lines that repeat those of the training files.
    """
    by_kind: dict[str, dict[str, Depth]] = defaultdict(dict)
    for path, depth in depths.items():
        by_kind[depth[0]][path] = depth
    for kind, found in by_kind.items():
        files = f"{len(found):,} files have" if len(found) > 1 else f"{next(iter(found))} has"
        if kind in _LOST:
            yield f"{split}: {files} {kind}; {_LOST[kind]}"
            continue
        low, high = value_range or FULL_RANGES[kind]
        span = [min(one[1] for one in found.values()), max(one[2] for one in found.values())]
        outside = sum(one[1] < low or one[2] > high for one in found.values())
        if outside or not brief:
            line = f"{split}: {files} {kind}, {_text(span)}; {_text((low, high))} becomes 0 to 255"
            line += f", and what is outside, in {outside:,}, is cut off" if outside else ""
            yield f"{line} (value_range=[{low:g},{high:g}])"


def _text(span: Sequence[float]) -> str:
    return f"{span[0]:g} to {span[1]:g}"
