"""What files say of nodes: features, labels, names, and which nodes a split has."""

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from attnkit.lightning.errors import UserError
from attnkit.tasks.node_classification.files.arrays import Part
from attnkit.tasks.node_classification.files.tables import lines, words


def read_features(part: Part) -> Tensor:
    """x [nodes, channels]; of an .npy it is mapped, of a table float32."""
    array = part.array(np.float32)
    if array.dtype.kind not in "fiub" or array.ndim != 2:
        raise UserError(
            f"{part.where}: expected numbers [nodes, channels], "
            f"got {array.dtype} {list(array.shape)}"
        )
    if not array.size:
        raise UserError(f"{part.where}: expected nodes and channels, got {list(array.shape)}")
    return torch.from_numpy(array)


def read_names(part: Part, count: int | None = None) -> list[str]:
    """The word on each line, all different.

    Args:
        count: how many are expected; of one more the first is a header.
    """
    if not part.is_text:
        named = [str(name) for name in part.array(np.int64, 1).flatten().tolist()]
    else:
        assert part.path is not None
        named = [name for name, _ in lines(part.path)]
    if count is not None and len(named) == count + 1:
        del named[0]
    if count not in (None, len(named)):
        raise UserError(f"{part.where}: expected {count} names, got {len(named)}")
    if len(set(named)) < len(named):
        seen: set[str] = set()
        twice = next(name for name in named if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise UserError(f"{part.where}: {twice!r} occurs twice")
    return named


def read_labels(part: Part, count: int, classes: Sequence[str]) -> tuple[Tensor, list[str]]:
    """y [nodes], the number of each node's class or −1, and the names of the classes.

    Text may hold the names of classes instead of numbers.

    Args:
        count: of the nodes.
        classes: their names; none: of names in the file these, sorted, of numbers none.
    """
    found = list(classes)
    if part.is_text and not _holds_numbers(part):
        assert part.path is not None
        rows = list(lines(part.path))
        rows = rows[len(rows) == count + 1 :]
        found = found or sorted({name for name, _ in rows})
        numbers = {name: number for number, name in enumerate(found)}
        for name, line in rows:
            if name not in numbers:
                raise UserError(f"{part.where}, line {line}: {name!r} is not the name of a class")
        labels = np.array([numbers[name] for name, _ in rows], np.int64)
    else:
        labels = part.array(np.int64, 1)
        labels = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.dtype.kind == "f" and (np.isnan(labels) | (labels == labels.round())).all():
        labels = np.where(np.isnan(labels), -1, labels).astype(np.int64)  # as OGB's binary files
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise UserError(
            f"{part.where}: expected a whole number per node, "
            f"got {labels.dtype} {list(labels.shape)}"
        )
    if len(labels) != count:
        raise UserError(f"{part.where}: expected {count} labels, one per node, got {len(labels)}")
    if labels.min() < -1:
        node = int(labels.argmin())
        raise UserError(
            f"{part.place_of(node)}: node {node} is of class {labels[node]}, "
            "expected one from 0 on, or -1 for none"
        )
    if found and labels.max() >= len(found):
        node = int(labels.argmax())
        raise UserError(
            f"{part.where}: node {node} is of class {labels[node]}, "
            f"but {len(found)} classes have names"
        )
    return torch.from_numpy(np.array(labels, np.int64)), found


def read_mask(part: Part, count: int, names: Mapping[str, int] | None = None) -> Tensor:
    """A mask, bool [nodes] or [nodes, splits], of one or of the numbers of its nodes.

    Args:
        count: of the nodes.
        names: of the nodes, to their numbers; None: text gives the numbers.
    """
    if part.is_text and names is not None:
        nodes = _numbers_of(part, names)
    else:
        nodes = part.array(np.int64, 1)
        is_mask = nodes.dtype == bool and len(nodes) == count and nodes.ndim in (1, 2)
        if is_mask and nodes.any():
            return torch.from_numpy(np.array(nodes))
        if is_mask:
            nodes = nodes.nonzero()[0]
        if nodes.dtype.kind not in "iu" or (nodes.ndim != 1 and nodes.shape[1:] != (1,)):
            raise UserError(
                f"{part.where}: expected numbers of nodes, or a mask bool [{count}] or "
                f"[{count}, splits], got {nodes.dtype} {list(nodes.shape)}"
            )
        nodes = nodes.reshape(-1)
    if not len(nodes):
        raise UserError(f"{part.where}: is empty, expected nodes")
    wrong = ((nodes < 0) | (nodes >= count)).nonzero()[0]
    if len(wrong):
        row = int(wrong[0])
        place = part.place_of(row) if part.is_table else f"{part.where}, place {row}"
        raise UserError(f"{place}: there is no node {nodes[row]}: expected 0 to {count - 1}")
    node, times = np.unique(nodes, return_counts=True)
    if len(node) < len(nodes):
        again = node[times > 1][0]
        rank_zero_warn(f"{part.where}: node {again} is there more than once; it counts once")
    mask = torch.zeros(count, dtype=torch.bool)
    mask[torch.from_numpy(np.array(nodes, np.int64))] = True
    return mask


def _holds_numbers(part: Part) -> bool:
    """Whether the second line, which is not a header, is a number."""
    assert part.path is not None
    rows = list(islice(words(part.path), 2))
    word = rows[-1][0][0] if rows else "0"
    return word.lstrip("+-").replace(".", "", 1).isdigit() or word.lower() == "nan"


def _numbers_of(part: Part, names: Mapping[str, int]) -> np.ndarray:
    assert part.path is not None
    found = []
    for number, (name, line) in enumerate(lines(part.path)):
        if name in names:
            found.append(names[name])
        elif number:  # the first may be a header
            raise UserError(f"{part.where}, line {line}: {name!r} is not the name of a node")
    return np.array(found, np.int64)
