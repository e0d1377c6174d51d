"""Reads edges from an array or a table, and names the place of a wrong edge."""

import re
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch_geometric.utils import to_undirected

from attnkit.lightning.errors import UserError
from attnkit.tasks.graphs.datasets.part import Part
from attnkit.tasks.graphs.datasets.text import Text

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
    graphs: np.ndarray | None = None,
) -> dict[str, Tensor]:
    """Return edge_index, int64 [2, edges], and the attributes of edges.

    The part has a source and a target in each row. An array may be [2, edges] or [edges, 2]; in a
    [2, 2] array each column is an edge. A table whose columns are called target and source, or dst
    and src, is read in that order. Repeated edges and self-loops are kept, and a warning counts
    them.

    Args:
        part: the part with the edges.
        num_nodes: the nodes are 0 to num_nodes − 1.
        names: numbers of the nodes by name; None: text holds the numbers.
        carried: the parts `edge_attr`, numbers [edges, channels], and `edge_weight`, [edges], if
            they exist.
        undirected: add the reverse of each edge with the same attributes; repeated edges are
            merged, with the mean of their attributes.
        graphs: the graph of each node, [nodes], for several graphs; no edge may join two of them.

    Raises:
        UserError: a row is no edge of these nodes; the message names its line or place.
    """
    others = {name: other for name, other in (carried or {}).items() if other is not None}
    if names is not None and isinstance(part, Text):
        part.refuse_commented(names)
    rows = _rows(part, names)
    part.check_rows(rows, "edges")
    if part.form.is_numbered and (names is None or {"0", "1"} <= names.keys()):
        beside = [(len(p.array(np.float32)), p.form.is_numbered) for p in others.values()]
        beside += [(size, False) for size in (part.rows,) if size is not None]
        is_again = bool((rows[1:] == rows[:1]).all(axis=1).any())
        rows = part.without_header(rows, beside, "0, 1, is an edge", is_header=is_again)
    _refuse_outside(part, rows, num_nodes)
    if graphs is not None:
        _refuse_between(part, rows, graphs)
    edges = rows.T[::-1] if _is_turned(part, names or {}) else rows.T
    edge_index = torch.from_numpy(np.ascontiguousarray(edges, np.int64))
    found = {name: _read_carried(name, other, len(rows)) for name, other in others.items()}
    if part.rows is None:
        part.refuse_other_index(others.values())
    if not undirected:
        _warn_of_oddities(part.where, edge_index, num_nodes)
        return {"edge_index": edge_index, **found}
    # for a list of attributes, even an empty one, PyG returns a list
    edge_index, values = to_undirected(
        edge_index, list(found.values()), num_nodes=num_nodes, reduce="mean"
    )
    return {"edge_index": edge_index, **dict(zip(found, values, strict=True))}


def _rows(part: Part, names: Names | None) -> np.ndarray:
    """Return the edges as whole numbers [edges, 2]."""
    if part.is_table:
        if names is None:
            return part.array(np.int64, 2)
        return np.fromiter(_named(part, names), np.dtype((np.int64, 2)))
    edges = part.array()
    if edges.dtype.kind not in "iu" or edges.ndim != 2 or 2 not in edges.shape:
        raise UserError(
            f"{part.where}: expected whole numbers [2, edges] or [edges, 2], "
            f"got {edges.dtype} {list(edges.shape)}"
        )
    return edges.T if edges.shape[0] == 2 else edges


def _named(part: Part, names: Names) -> Iterator[tuple[int, int]]:
    """Yield edges given by names of nodes; a first line of other words is a header."""
    for number, (fields, place) in enumerate(part.fields()):
        if len(fields) != 2:
            raise UserError(f"{part.where}{place}: expected 2 names of nodes, got {fields}")
        unknown = [name for name in fields if name not in names]
        if len(unknown) == 2 and not number and part.form.may_have_header:
            continue
        if unknown:
            raise UserError(f"{part.where}{place}: {unknown[0]!r} is not the name of a node")
        yield names[fields[0]], names[fields[1]]


def _refuse_outside(part: Part, rows: np.ndarray, num_nodes: int) -> None:
    """Raise a `UserError` at the first edge with a node that does not exist."""
    wrong = (rows < 0) | (rows >= num_nodes)
    if not wrong.any():
        return
    row, column = np.argwhere(wrong)[0].tolist()
    raise UserError(
        f"{_place(part, row)}: there is no node {rows[row, column]}: expected 0 to "
        f"{num_nodes - 1}; for other numbers or names write nodes.txt, with one line for each node"
    )


def _refuse_between(part: Part, rows: np.ndarray, graphs: np.ndarray) -> None:
    """Raise a `UserError` at the first edge between two graphs."""
    ends = graphs[rows]
    between = ends[:, 0] != ends[:, 1]
    if between.any():
        row = int(between.argmax())
        (one, other), (first, second) = rows[row].tolist(), ends[row].tolist()
        raise UserError(
            f"{_place(part, row)}: joins node {one} of graph {first} and node {other} of graph "
            f"{second}, expected nodes of one graph"
        )


def _place(part: Part, row: int) -> str:
    return part.place_of(row) if part.is_table else f"{part.where}, edge {row}"


def _is_turned(part: Part, names: Names) -> bool:
    """Return whether the header of a table names its first column as the target.

    Raises:
        UserError: the header names only one of the two columns as target or source.
    """
    header = part.form.header
    if len(header) != 2 or (part.form.may_have_header and any(name in names for name in header)):
        return False
    first, second = (name.strip().lower() for name in header)
    says = bool(_TARGET.fullmatch(first)), bool(_SOURCE.fullmatch(second))
    if any(says) and not all(says):
        raise UserError(
            f"{part.where}: the columns {header[0]} and {header[1]} do not say which is the "
            "source; expected source and target, or target and source"
        )
    return all(says)


def _read_carried(name: str, part: Part, num_edges: int) -> Tensor:
    values = part.array(np.float32)
    part.check_rows(values)
    if len(values) == num_edges + 1 and part.form.is_numbered:
        values = part.without_first(values)
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


def _warn_of_oddities(where: str, edge_index: Tensor, num_nodes: int) -> None:
    """Warn of repeated edges and self-loops, which are kept."""
    source, target = edge_index
    loops = int((source == target).sum())
    keys = (target * num_nodes).add_(source).numpy()
    keys.sort()  # in place, which takes a third of the memory of torch's sort
    repeats = int((keys[1:] == keys[:-1]).sum())
    found = [f"{repeats:,} edges are given again"] * bool(repeats)
    found += [f"{loops:,} lead from a node to itself"] * bool(loops)
    if found:
        rank_zero_warn(f"{where}: {' and '.join(found)}; they count as they are")
