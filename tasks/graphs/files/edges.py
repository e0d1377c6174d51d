"""Edges from an array or a table, each checked, with the place of a wrong one."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch_geometric.utils import to_undirected

from attnkit.lightning.errors import UserError
from attnkit.tasks.graphs.files.arrays import Part
from attnkit.tasks.graphs.files.tables import (
    ROWS,
    blocks,
    first_row,
    index_of,
    line_of,
    named_rows,
    refuse_commented,
)

Names = Mapping[str, int]
_SOURCE, _TARGET = (
    re.compile(rf"({words})([ _]?(node|id|idx|index|name))*")
    for words in ("source|src|from", "target|tgt|dst|dest|destination|to")
)


def read_edges(
    part: Part,
    num_nodes: int,
    names: Names | None = None,
    *,
    carried: Mapping[str, Part | None] | None = None,
    undirected: bool = False,
) -> dict[str, Tensor]:
    """edge_index, int64 [2, edges], of a part with a source and a target per row, and what the
    edges carry.

    An array may be [2, edges] or [edges, 2]; of [2, 2] each column is an edge. A table whose
    columns are called target and source, or dst and src, is read so. Edges that are given more than
    once and those of a node with itself stay, and a warning counts them.

    Args:
        num_nodes: the nodes are 0 to num_nodes − 1.
        names: of the nodes, to their numbers; None: text gives the numbers.
        carried: `edge_attr`, numbers [edges, channels], and `edge_weight`, [edges], where there
            are such parts.
        undirected: add the reverse of each edge, which carries the same, and leave each once, with
            the mean of what its copies carry.

    Raises:
        UserError: what is not an edge of these nodes, with its line or place.
    """
    if not part.is_table:
        edges = _from_array(part, num_nodes)
    else:
        if names is not None and part.is_text:
            refuse_commented(part.path, names)
        rows = _numbered(part.path, num_nodes) if names is None else _named(part, names)
        # int32 halves what is held twice while the blocks are joined
        kind = np.int32 if num_nodes < 2**31 else np.int64
        read = [block.T.astype(kind) for block in rows]
        edges = np.empty((2, sum(block.shape[1] for block in read)), np.int64)
        if part.rows not in (None, edges.shape[1]):
            raise UserError(f"{part.where}: expected {part.rows:,} edges, got {edges.shape[1]:,}")
        if read:
            np.concatenate(read, axis=1, out=edges)
        if part.is_numbered and (names is None or {"0", "1"} <= names.keys()):
            edges = _without_header(edges, part, [p for p in (carried or {}).values() if p])
        if _is_turned(part, names or {}):
            edges = edges[::-1].copy()
    edge_index = torch.from_numpy(edges)
    _refuse_other_index(part, carried or {})
    found = {
        name: _read_carried(name, part, edges.shape[1])
        for name, part in (carried or {}).items()
        if part is not None
    }
    if not undirected:
        _warn_of_oddities(part.where, edge_index, num_nodes)
        return {"edge_index": edge_index, **found}
    # with a list PyG gives back a list, of which an empty one is nothing
    edge_index, values = to_undirected(
        edge_index, list(found.values()), num_nodes=num_nodes, reduce="mean"
    )
    return {"edge_index": edge_index, **dict(zip(found, values, strict=True))}


def _refuse_other_index(part: Part, carried: Mapping[str, Part | None]) -> None:
    """UserError if what edges carry has another index than they have; of an array it counts."""
    if part.rows is not None:
        return
    here, *others = [
        (one, index_of(one.path) if one.is_table else [])
        for one in (part, *carried.values())
        if one is not None
    ]
    for other, index in others:
        both = list(zip(here[1], index, strict=False))
        if len(here[1]) != len(index) or not all(np.array_equal(a, b) for a, b in both):
            raise UserError(
                f"{other.where}: its index is not that of {part.where}; put the rows of both in "
                "one order, and leave the index out"
            )


def _is_turned(part: Part, names: Names) -> bool:
    """Whether a table says that its first column is the target.

    Raises:
        UserError: it says so of one of its columns only.
    """
    header = first_row(part.path)
    if len(header) != 2 or (part.is_text and any(name in names for name in header)):
        return False
    first, second = (name.strip().lower() for name in header)
    says = bool(_TARGET.fullmatch(first)), bool(_SOURCE.fullmatch(second))
    if any(says) and not all(says):
        raise UserError(
            f"{part.where}: the columns {header[0]} and {header[1]} do not say which is the "
            "source; expected source and target, or target and source"
        )
    return all(says)


def _without_header(edges: np.ndarray, part: Part, carried: Sequence[Part]) -> np.ndarray:
    """Edges without a first row 0, 1 that is a header, as pandas writes it of columns without
    names, where what they carry or the same edge further on says so.

    Raises:
        UserError: it may be either.
    """
    sizes = [part.rows, *(len(p.array(np.float32)) for p in carried if not p.is_numbered)]
    if edges.shape[1] in sizes:
        return edges
    if edges.shape[1] - 1 in sizes or (edges[:, 1:] == edges[:, :1]).all(axis=0).any():
        part.skipped = 1
        return edges[:, 1:]
    raise UserError(
        f"{part.where}: the first row, 0, 1, is an edge, or a header of columns without names; "
        "write a header of words"
    )


def _read_carried(name: str, part: Part, num_edges: int) -> Tensor:
    values = part.array(np.float32)
    if len(values) == num_edges + 1 and part.is_numbered:  # a header of pandas
        part.skipped, values = 1, values[1:]
    if name == "edge_weight" and values.shape[1:] == (1,):
        values = values[:, 0]
    shape = f"[{num_edges}]" if name == "edge_weight" else f"[{num_edges}, channels]"
    is_right = values.ndim == 1 or (values.ndim == 2 and name == "edge_attr")
    if values.dtype.kind not in "fiub" or not is_right or len(values) != num_edges:
        raise UserError(
            f"{part.where}: expected numbers {shape}, one row per edge, "
            f"got {values.dtype} {list(values.shape)}"
        )
    part.refuse_index(values, "a feature")
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        value = values[tuple(wrong[0])]
        raise UserError(f"{part.place_of(int(wrong[0, 0]))}: is {value}, expected finite numbers")
    return torch.from_numpy(np.array(values, np.float32))


def _from_array(part: Part, num_nodes: int) -> np.ndarray:
    edges = part.array()
    if edges.dtype.kind not in "iu" or edges.ndim != 2 or 2 not in edges.shape:
        raise UserError(
            f"{part.where}: expected whole numbers [2, edges] or [edges, 2], "
            f"got {edges.dtype} {list(edges.shape)}"
        )
    edges = edges if edges.shape[0] == 2 else edges.T
    for start in range(0, edges.shape[1], ROWS):
        wrong = _outside(edges[:, start : start + ROWS].T, num_nodes)
        if wrong is not None:
            row, node = wrong
            raise _not_there(f"{part.where}, edge {start + row}", node, num_nodes)
    return np.ascontiguousarray(edges, np.int64)


def _numbered(path: Path, num_nodes: int) -> Iterator[np.ndarray]:
    before = 0
    for block in blocks(path, np.int64, 2):
        wrong = _outside(block, num_nodes)
        if wrong is not None:
            row, node = wrong
            raise _not_there(f"{path}{line_of(path, before + row)}", node, num_nodes)
        before += len(block)
        yield block


def _outside(rows: np.ndarray, num_nodes: int) -> tuple[int, int] | None:
    """The first row with a node that is not there, and that node."""
    wrong = (rows < 0) | (rows >= num_nodes)
    if not wrong.any():
        return None
    row, column = np.argwhere(wrong)[0]
    return int(row), int(rows[row, column])


def _not_there(where: str, node: int, num_nodes: int) -> UserError:
    return UserError(
        f"{where}: there is no node {node}: expected 0 to {num_nodes - 1}; for other numbers or "
        "names write nodes.txt, with one line for each node"
    )


def _named(part: Part, names: Names) -> Iterator[np.ndarray]:
    """Edges by the names of nodes; a first line of other words is a header."""
    rows: list[tuple[int, int]] = []
    for number, (fields, place) in enumerate(named_rows(part.path)):
        if len(fields) != 2:
            raise UserError(f"{part.where}{place}: expected 2 names of nodes, got {fields}")
        unknown = [name for name in fields if name not in names]
        if len(unknown) == 2 and not number and part.may_have_header:
            continue
        if unknown:
            raise UserError(f"{part.where}{place}: {unknown[0]!r} is not the name of a node")
        rows.append((names[fields[0]], names[fields[1]]))
        if len(rows) == ROWS:
            yield np.array(rows)
            rows = []
    if rows:
        yield np.array(rows)


def _warn_of_oddities(where: str, edge_index: Tensor, num_nodes: int) -> None:
    """Edges given twice and self-loops, which are used as they are."""
    source, target = edge_index
    loops = int((source == target).sum())
    keys = (target * num_nodes).add_(source).numpy()
    keys.sort()  # in place: a third of what a sort of torch's takes
    repeats = int((keys[1:] == keys[:-1]).sum())
    found = [f"{repeats:,} edges are given again"] * bool(repeats)
    found += [f"{loops:,} lead from a node to itself"] * bool(loops)
    if found:
        rank_zero_warn(f"{where}: {' and '.join(found)}; they count as they are")
