"""Reads features, labels, names and splits of nodes from files."""

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from attnkit.lightning.errors import UserError
from attnkit.tasks.graphs.base import Target
from attnkit.tasks.graphs.datasets.part import Part, are_whole, numbers_of
from attnkit.tasks.graphs.datasets.text import Text

NO_LABEL = ("", "-1", "-1.0", "nan", "<na>")  # words for no label, in lower case
UNCLEAR = ("na", "n/a", "none", "null")  # may be a class, or what some programs write for no label


def read_features(part: Part, beside: Sequence[Part] = ()) -> Tensor:
    """Return x [nodes, channels]: mapped for an .npy, float32 for a table.

    Args:
        part: the part with the features.
        beside: other parts with a row for each node. Their number of rows decides whether a first
            row 0, 1, 2, … is a header.
    """
    array = part.array(np.float32)
    part.check_index()
    part.check_rows(array)
    if array.dtype.kind not in "fiub" or array.ndim != 2:
        raise UserError(
            f"{part.where}: expected numbers [nodes, channels], "
            f"got {array.dtype} {list(array.shape)}"
        )
    if part.form.is_numbered and part.rows is None and array.shape[1] > 1:
        sizes = [(len(other.words()), other.form.is_numbered) for other in beside]
        array = part.without_header(array, sizes, "0, 1, 2, …, is the features of a node")
    if not array.size:
        raise UserError(f"{part.where}: expected nodes and channels, got {list(array.shape)}")
    return torch.from_numpy(array)


def read_names(part: Part, count: int | None = None) -> list[str]:
    """Return the word on each line; all words must differ.

    Args:
        part: the part with the names.
        count: the expected number; if there is one more, the first word is a header.
    """
    words = part.words(count)
    if words.ndim != 1 or words.dtype.kind == "f":
        raise UserError(f"{part.where}: expected a name per row, got {list(words.shape)}")
    named = [str(name) for name in words.tolist()]
    if count not in (None, len(named)):
        raise UserError(f"{part.where}: expected {count} names, got {len(named)}")
    if len(set(named)) < len(named):
        seen: set[str] = set()
        twice = next(name for name in named if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise UserError(f"{part.where}: {twice!r} occurs twice")
    return named


def read_labels(part: Part, count: int, classes: Sequence[str]) -> tuple[Tensor, list[str]]:
    """Return y [nodes], the number of each node's class or −1, and the names of the classes.

    Text may hold names of classes instead of numbers; truth values are the classes False and True.

    Args:
        part: the part with the labels.
        count: number of nodes.
        classes: the names of the classes; if empty, they are the sorted names in the file, and
            numbers have no names.
    """
    words = part.words(count)
    found, labels = list(classes), numbers_of(words)
    if labels.ndim == 1 and len(labels) != count:
        raise UserError(
            f"{part.where}: expected {count} labels, one per {part.item}, got {len(labels)}"
        )
    if labels.ndim == 1 and words.dtype.kind == "U":
        _refuse_two_spellings(part, words, labels)
    if labels.dtype.kind in "Ub" and labels.ndim == 1:
        names, numbers = np.unique(labels.astype(str), return_inverse=True)
        found = found or [n for n in names.tolist() if n.lower() not in (*NO_LABEL, *UNCLEAR)]
        number_of = {name: number for number, name in enumerate(found)}
        for number, name in enumerate(names.tolist()):
            node = int((numbers == number).argmax())
            if name not in number_of and name.lower() in UNCLEAR:
                raise UserError(
                    f"{part.place_of(node)}: {name!r} is a class, or no label; for a class name "
                    "all of them in classes.csv, for no label write -1"
                )
            if name not in number_of and name.lower() not in NO_LABEL:
                raise UserError(f"{part.place_of(node)}: {name!r} is not the name of a class")
        labels = np.array([number_of.get(name, -1) for name in names.tolist()])[numbers]
    if labels.dtype.kind == "f":  # as in OGB's binary files, in which NaN is no label
        no_label = np.isnan(labels)
        if (no_label | are_whole(labels)).all():
            labels = np.where(no_label, -1, labels).astype(np.int64)
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        hint = "; an index is left out if it has no name" if labels.ndim == 2 else ""
        raise UserError(
            f"{part.where}: expected a whole number per {part.item}, "
            f"got {labels.dtype} {list(labels.shape)}{hint}"
        )
    if labels.min() < -1:
        node = int(labels.argmin())
        raise UserError(
            f"{part.place_of(node)}: {part.item} {node} is of class {labels[node]}, "
            "expected one from 0 on, or -1 for none"
        )
    if found and labels.max() >= len(found):
        node = int(labels.argmax())
        raise UserError(
            f"{part.place_of(node)}: {part.item} {node} is of class {labels[node]}, "
            f"but {len(found)} classes have names"
        )
    return torch.from_numpy(np.array(labels, np.int64)), found


def _refuse_two_spellings(part: Part, words: np.ndarray, labels: np.ndarray) -> None:
    """Raise a `UserError` if one number is spelled in two ways (01 and 1), except 1.0 for 1."""
    if labels.dtype.kind == "U":
        return
    spelled: dict[float, str] = {}
    for word, node in zip(*np.unique(words, return_index=True), strict=True):
        plain, number = re.sub(r"\.0*$", "", str(word).strip()), float(labels[node])
        if spelled.setdefault(number, plain) != plain and not np.isnan(number):
            raise UserError(
                f"{part.place_of(int(node))}: {plain!r} and {spelled[number]!r} are one class or "
                "two; write one of them, or names that are no numbers"
            )


def read_values(
    part: Part, count: int, target: Target, names: Sequence[str] = (), items: Iterable[str] = ()
) -> tuple[Tensor, list[str]]:
    """Return labels or numbers of each node or graph, float32 [rows, outputs], and their names.

    Empty cells and nan are unknown; labels are 0 and 1, or False and True.

    Args:
        part: the part with the values.
        count: number of rows.
        target: "labels" or "numbers".
        names: names of the columns; if empty, those in the header, if there is one.
        items: names of the nodes or graphs, if they have any. A column of them is refused.
    """
    words = part.words(count)
    words = words[:, None] if words.ndim == 1 else words
    if len(words) != count or words.ndim != 2 or not words.shape[1]:
        raise UserError(
            f"{part.where}: expected {count} rows of {target}, one per {part.item}, "
            f"got {list(words.shape)}"
        )
    if words.dtype.kind not in "iufbU":
        raise UserError(f"{part.where}: expected {target}, numbers, got {words.dtype}")
    if words.dtype.kind == "U":
        lower = np.char.lower(words)
        words = np.where(lower == "true", "1", np.where(lower == "false", "0", words))
    values = numbers_of(words)
    if values.dtype.kind not in "iufb":
        flat = words.ravel().tolist()
        wrong = next(
            n for n, word in enumerate(flat) if numbers_of(np.array([word])).dtype.kind == "U"
        )
        raise UserError(
            f"{part.place_of(wrong // words.shape[1])}: expected a number, or nothing where it is "
            f"not known, got {flat[wrong]!r}"
        )
    part.refuse_index(values, f"a {target[:-1]}", list(items))
    header = part.form.header if part.form.is_header or not part.form.may_have_header else ()
    found = list(names or (header if len(header) == values.shape[1] else ()))
    if found and len(found) != values.shape[1]:
        raise UserError(
            f"{part.where}: expected {len(found)} {target}, one for each of the names in classes, "
            f"got {values.shape[1]}"
        )
    return torch.from_numpy(values.astype(np.float32)), found


def read_targets(
    part: Part, count: int, target: Target, names: Sequence[str] = (), items: Iterable[str] = ()
) -> tuple[Tensor, list[str]]:
    """Return the classes, labels or numbers of a part, and their names.

    See `read_labels` for classes, and `read_values` for labels, numbers and the arguments.
    """
    if target == "classes":
        return read_labels(part, count, names)
    return read_values(part, count, target, names, items)


def read_mask(part: Part, count: int, names: Mapping[str, int] | None = None) -> Tensor:
    """Return a mask, bool [nodes] or [nodes, splits], read from a mask or from numbers of nodes.

    A mask has a row for each node, of truth values or of 0 and 1.

    Args:
        part: the part with the mask or the numbers.
        count: number of nodes.
        names: numbers of the nodes by name; None: text holds the numbers.
    """
    if names is not None and isinstance(part, Text):
        part.refuse_commented(names)
    words = part.words(count)
    if names is not None and not len(words) and any(part.form.header):
        words = np.array(part.form.header)  # a single name is no header
        if part.form.may_have_header and (unknown := [word for word in words if word not in names]):
            raise UserError(
                f"{part.where}: expected names of {part.item}s, got {str(unknown[0])!r} alone, "
                "which is none"
            )
    if names is not None and part.is_table and words.dtype.kind in "iuf":
        words = words.astype(str)  # names that are digits are numbers in Parquet
    values = _truths(numbers_of(words))
    is_binary = values.dtype.kind in "iuf" and values.size > 0 and np.isin(values, (0, 1)).all()
    is_mask = values.dtype == bool or bool(is_binary)
    if is_mask and values.ndim in (1, 2) and len(values) == count:
        if values.dtype != bool and len(np.unique(values)) == values.size:
            raise UserError(
                f"{part.where}: {values.tolist()} is a mask, or the numbers of {part.item}s; "
                "write a mask of True and False"
            )
        values = values.astype(bool)
        if values.any():
            return torch.from_numpy(np.array(values))
        values = np.array([], int)
    elif is_mask and values.dtype != bool and len(np.unique(values)) < values.size:
        raise UserError(
            f"{part.where}: holds only 0 and 1, as a mask: expected one of {count} {part.item}s, "
            f"got {list(values.shape)}"
        )
    elif words.ndim == 1 and "U" in (values.dtype.kind, words.dtype.kind if names else ""):
        has_header = part.form.may_have_header and values.dtype.kind == "U"
        values = _nodes_of(part, words, names, has_header)
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise UserError(
            f"{part.where}: expected numbers of {part.item}s, or a mask bool [{count}] or "
            f"[{count}, splits], got {values.dtype} {list(values.shape)}"
        )
    if not len(values):
        raise UserError(f"{part.where}: is empty, expected {part.item}s")
    wrong = ((values < 0) | (values >= count)).nonzero()[0]
    if len(wrong):
        row = int(wrong[0])
        where = part.place_of(row) if part.is_table else f"{part.where}, place {row}"
        raise UserError(
            f"{where}: there is no {part.item} {values[row]}: expected 0 to {count - 1}"
        )
    if part.form.is_numbered:
        rank_zero_info(f"{part.where}: the first row is read as a {part.item}, not as a header")
    node, times = np.unique(values, return_counts=True)
    if len(node) < len(values):
        again = node[times > 1][0]
        rank_zero_warn(f"{part.where}: {part.item} {again} is there more than once; it counts once")
    mask = torch.zeros(count, dtype=torch.bool)
    mask[torch.from_numpy(np.array(values, np.int64))] = True
    return mask


def _truths(words: np.ndarray) -> np.ndarray:
    """Return truth values if all words are True or False, otherwise the words."""
    if words.dtype.kind != "U" or not words.size:
        return words
    lower = np.char.lower(words)
    return lower == "true" if np.isin(lower, ("true", "false")).all() else words


def _nodes_of(
    part: Part, words: np.ndarray, names: Mapping[str, int] | None, may_have_header: bool
) -> np.ndarray:
    """Return the numbers of nodes given by name; the first word may be a header.

    Raises:
        UserError: a word is not the name of a node, or there are no names.
    """
    if names is None:
        wrong = next(n for n in range(len(words)) if numbers_of(words[n : n + 1]).dtype.kind == "U")
        raise UserError(
            f"{part.place_of(wrong)}: expected the number of a {part.item}, "
            f"got {str(words[wrong])!r}"
        )
    unknown = [number for number, word in enumerate(words.tolist()) if word not in names]
    if unknown and not (may_have_header and unknown == [0]):
        wrong = unknown[may_have_header and unknown[0] == 0]
        raise UserError(
            f"{part.place_of(wrong)}: {str(words[wrong])!r} is not the name of a {part.item}"
        )
    return np.array([names[word] for word in words[len(unknown) :].tolist()], np.int64)
