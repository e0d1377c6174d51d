"""Held-out links that the data provides, as published by the Open Graph Benchmark."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit.lightning.errors import UserError
from attnkit.tasks.graphs.files.pickles import load_saved

_SHARED = ("edge", "edge_neg")
_OWN = ("source_node", "target_node", "target_node_neg")


class HeldOut(NamedTuple):
    """The edges of val or test that the data provides.

    pairs: int64 [2, edges]; one direction of each edge in an undirected graph.
    absent: the pairs among which edges are ranked: [2, absent], the same for all edges; or [2,
        edges, k], k for each edge; None: they are drawn.
    where: the file, for messages.
    """

    pairs: Tensor
    absent: Tensor | None = None
    where: str = "data"

    def check(self, num_nodes: int) -> None:
        """Raise a `UserError` if these are no pairs of nodes below `num_nodes`."""
        for name, given, dims in (
            ("edges", self.pairs, (2,)),
            ("absent pairs", self.absent, (2, 3)),
        ):
            if given is None:
                continue
            if given.dtype != torch.int64 or given.ndim not in dims or len(given) != 2:
                got = f"{given.dtype} {list(given.shape)}"
                raise UserError(f"{self.where}: expected {name}, int64 [2, …], got {got}")
            if not given.numel():
                raise UserError(f"{self.where}: expected {name}, got none")
            low, high = map(int, given.aminmax())
            if low < 0 or high >= num_nodes:
                wrong = low if low < 0 else high
                raise UserError(
                    f"{self.where}: there is no node {wrong} of {name}: expected 0 to "
                    f"{num_nodes - 1}"
                )
        count = self.pairs.shape[1]
        if self.absent is not None and self.absent.ndim == 3 and self.absent.shape[1] != count:
            raise UserError(
                f"{self.where}: expected absent pairs of {count} edges, got {self.absent.shape[1]}"
            )


def read_ogb(path: Path) -> HeldOut:
    """Read `valid.pt` or `test.pt` of a link set of OGB.

    The file holds a dictionary of arrays: `edge` [edges, 2] and `edge_neg` [absent, 2], among which
    each edge is ranked; or `source_node` [edges], `target_node` [edges] and `target_node_neg`
    [edges, k], targets that a source is not joined to. Other arrays, such as `weight` and `year`,
    are not read.

    Raises:
        UserError: the file does not hold these arrays.
    """
    found = load_saved(path)
    known: dict[str, Any] = found if isinstance(found, dict) else {}
    given = {
        name: one.long()
        for name in (*_SHARED, *_OWN)
        if isinstance(one := known.get(name), Tensor) and not one.is_floating_point()
    }
    if given.keys() == set(_SHARED):
        return HeldOut(given["edge"].T, given["edge_neg"].T, str(path))
    if given.keys() == set(_OWN):
        source, target, others = (given[name] for name in _OWN)
        if source.shape == target.shape == others.shape[:1] and others.ndim == 2:
            absent = torch.stack([source[:, None].expand_as(others), others])
            return HeldOut(torch.stack([source, target]), absent, str(path))
    held = {name: list(getattr(one, "shape", ())) for name, one in known.items()}
    raise UserError(
        f"{path}: expected arrays {' and '.join(_SHARED)}, or {', '.join(_OWN)}, got "
        f"{', '.join(f'{name} {shape}' for name, shape in held.items()) or type(found).__name__}"
    )
