"""Lines that describe data at the start of a run, from data that is set up."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from attnkit.tasks.images.sizes import sides
from attnkit.tasks.loaders import module_of

MAX_NAMED = 10  # classes that are named one by one
_IN_LINE = 5


def split_line(kind: str, counts: Mapping[str, int], rest: str = "") -> str:
    """Return a line such as `data: 1,257 train, 180 val, 360 test images, …`."""
    parts = ", ".join(f"{count:,} {split}" for split, count in counts.items())
    return f"data: {parts} {kind}{rest}"


def outputs_text(target: str, count: int) -> str:
    """Return what is learned, as ` in 7 classes` or ` with 7 labels each`, for `split_line`."""
    if target == "classes":
        return f" in {count} classes"
    return f" with {count} {target if count > 1 else target[:-1]} each"


def class_lines(labels: Mapping[str, Tensor], names: Sequence[str]) -> list[str]:
    """Return lines with the number of samples of each class by split, and its spread in train.

    Args:
        labels: labels of the samples, by split.
        names: names of the classes.
    """
    counts = {s: found.bincount(minlength=len(names)).tolist() for s, found in labels.items()}
    train = counts["train"]
    order = sorted(range(len(names)), key=train.__getitem__)
    least, most = train[order[0]], train[order[-1]]
    line = f"  in train {least:,} ({names[order[0]]}) to {most:,} ({names[order[-1]]}) of a class"
    if least == most:
        line = f"  in train {most:,} of each class"
    elif least and most >= 1.5 * least:
        line += f", {most / least:.3g} times as many"
    if len(names) > MAX_NAMED:
        return [line]
    each = [
        f"{name}: {'/'.join(f'{found[number]:,}' for found in counts.values())}"
        for number, name in enumerate(names)
    ]
    rows = [each[start : start + _IN_LINE] for start in range(0, len(each), _IN_LINE)]
    lines = [f"{line}; {'/'.join(counts)} of each:"]
    lines += [f"  {', '.join(row)}" for row in rows]
    return lines


def value_lines(labels: Mapping[str, Tensor], names: Sequence[str]) -> list[str]:
    """Return lines with the number of images that have each label, by split; for numbers, their
    range and mean in train.

    Args:
        labels: labels or numbers of the samples, [samples, outputs], by split.
        names: names of the labels or numbers.
    """
    known = labels["train"][~labels["train"].isnan()]
    if not bool(((known == 0) | (known == 1)).all()):
        return [
            f"  {name} in train: {column.min():.4g} to {column.max():.4g}, mean {column.mean():.4g}"
            for name, column in zip(names[:MAX_NAMED], labels["train"].T, strict=False)
        ]
    counts = [(found == 1).sum(dim=0).tolist() for found in labels.values()]
    each = [
        f"{n}: {'/'.join(f'{c:,}' for c in row)}" for n, *row in zip(names, *counts, strict=True)
    ]
    more = f", … and {len(each) - MAX_NAMED} more" if len(each) > MAX_NAMED else ""
    without = int((labels["train"] == 1).any(dim=1).logical_not().sum())
    none = f"; {without:,} images of train have none" if without else ""
    return [
        f"  {'/'.join(labels)} with each label{none}:",
        f"  {', '.join(each[:MAX_NAMED])}{more}",
    ]


def image_lines(images: Any, data: Any) -> list[str]:
    """The size and channels of images as they are and as they are used; mean and deviation.

    Args:
        images: the training images, with `size` and `channels`.
        data: the data module, with the module that it serves in its trainer.
    """
    module = module_of(data)
    colours = {1: "grey", 3: "RGB"}
    used = getattr(data, "image_size", None) or images.size
    line = f"  {colours.get(images.channels, images.channels)}, {_size(images.size)} pixels"
    if sides(used) != sides(images.size) or data.in_channels != images.channels:
        line += f"; used as {colours.get(data.in_channels, '')} of {_size(used)}"
    if (tokens := getattr(images, "sizes", None)) is not None:
        line = f"  {colours.get(images.channels)}, images of their own sizes, {int(tokens.min()):,}"
        line += f" to {int(tokens.max()):,} patches; positions are learned for {_size(used)}"
    embedding = getattr(getattr(module, "model", None), "patch_embed", None)
    patch = getattr(embedding, "patch_size", None)
    if patch is not None:
        line += f", in patches of {_size(patch)}"
    lines = [line]
    mean, std = getattr(module, "mean", None), getattr(module, "std", None)
    if isinstance(mean, Tensor) and isinstance(std, Tensor):
        texts = [" ".join(f"{v:.3f}" for v in values.flatten().tolist()) for values in (mean, std)]
        lines.append(f"  mean {texts[0]}, deviation {texts[1]}")
    return lines


def _size(size: Any) -> str:
    return " × ".join(map(str, sides(size)))
