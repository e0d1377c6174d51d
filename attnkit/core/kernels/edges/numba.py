"""Attention over edges on a CPU by kernels that numba compiles: their limits and their calls.

A kernel reads the rows at both ends of an edge once in the forward and once for each order in the
backward, and keeps no tensor of edges between the two. Its few long tasks do not wait for other
threads, so that other processes slow it only by the share of cores that they take.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import (
    computes_by_operators,
    device_reasons,
    first_channels,
    multiple_of_8,
    sink_gradient,
    with_channels,
)
from attnkit.core.kernels.edges.edges import EdgesKernel
from attnkit.core.kernels.edges.problem import EdgeProblem, Gradients, Results
from attnkit.core.masks.edges import Edges
from attnkit.core.operators.cpu import caches, run_tasks
from attnkit.core.operators.precision import EXACT
from attnkit.core.scores.additive import Additive

LARGEST_DIM = 256
WIDEST_DOT = 32  # above, torch's operators are faster: they read one table at a time
GROUP = 2**20  # edges × lanes that are computed at once
ALONE = 2**22  # edges × lanes × channels up to which one thread computes all
BLOCK = 2**13  # least edges of a task
TASKS = 4  # least tasks per thread
FEW = 8  # with fewer reads of a row, copying it does not pay
BY_SOURCE = ("by_source", "source_offsets", "target_by_source")


class NumbaEdgesKernel(EdgesKernel):
    """The kernel for `Edges` on a CPU that numba compiles."""

    name = "edges_numba"
    is_exact = True  # each row is summed by one task, in the order of its own edges

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        yield from super().reasons(inputs)
        if not isinstance(inputs.mask, Edges):
            return
        yield from device_reasons(inputs, "cpu")
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            yield "cannot be traced by torch"
        elif type(inputs.query) not in (Tensor, nn.Parameter):
            yield f"needs tensors with numbers, got {type(inputs.query).__name__}"
        if not _is_there():  # not before: torch.compile warns of a cached function
            yield "needs numba"
        if inputs.query.dtype == torch.float64:
            yield "needs float32, bfloat16 or float16, got torch.float64"
        score = inputs.score
        if isinstance(score, Additive) and score.activation != "leaky_relu":
            yield f"needs the activation 'leaky_relu', got {score.activation!r}"
        if EXACT.get() and inputs.is_grouped:
            yield "has no exact grouped heads, whose gradients torch sums"
        if EXACT.get() and computes_by_operators():
            yield "is counted by torch's operators, which are not exact; count outside the block"
        dim = max(inputs.query.shape[3], inputs.value.shape[3])
        if dim > LARGEST_DIM:
            yield f"needs a head_dim of at most {LARGEST_DIM}, got {dim}"
        if 2 * inputs.mask.num_edges + sum(inputs.mask.sizes) >= 2**31:
            yield f"needs fewer than 2³⁰ edges, got {inputs.mask.num_edges}"

    def pays(self, inputs: Inputs) -> bool:
        if EXACT.get():
            return True
        is_dot = not isinstance(inputs.score, Additive)
        if is_dot and inputs.edge_features is None and inputs.query.shape[3] > WIDEST_DOT:
            return False
        return super().pays(inputs)

    def forward(self, problem: EdgeProblem) -> tuple[Results, Results]:
        """Compute outputs and sums of features; and two numbers of each softmax."""
        (output, sums), (softmax,) = _Job(problem).forward()
        if problem.sink is not None:
            share = torch.sigmoid(_lse(softmax) - problem.sink)  # the edges' share of the weight
            output, sums, _ = output.mul_(share), sums.mul_(share), softmax[..., 1:].mul_(share)
        return (output, sums), (softmax,)

    def backward(
        self, problem: EdgeProblem, results: Results, gradients: Gradients, wanted: set[str]
    ) -> dict[str, Tensor]:
        found = _Job(problem).backward(results, gradients, wanted - {"sink"})
        if "sink" in wanted:
            assert problem.sink is not None
            *outputs, softmax = results
            pairs = zip(outputs, gradients, strict=True)
            found["sink"] = sink_gradient(problem.sink, _lse(softmax), *pairs)
        return found


def _lse(softmax: Tensor) -> Tensor:
    """Return the log-sum-exp of each target, [lanes, targets, 1]; ∞ for targets without edges."""
    return softmax[..., :1] - softmax[..., 1:].log()


@cache
def _is_there() -> bool:
    return find_spec("numba") is not None


class _Job:
    """One forward or backward: the tensors as kernels read them, and the tasks for the threads.

    Channels are padded with zeros to whole vectors, which does not change the results.
    """

    def __init__(self, problem: EdgeProblem) -> None:
        self.problem, self.graph = problem, problem.adjacency
        self.num_lanes, self.num_targets, dim = problem.query.shape
        self.is_dot = problem.vector is None
        self.head_dim = 1 if dim == 1 and not self.is_dot else multiple_of_8(dim)  # 1: as in GAT
        self.value_dim = multiple_of_8(problem.value.shape[2])
        self.edge_dim = 0 if problem.features is None else multiple_of_8(problem.features.shape[1])
        dims = dict.fromkeys(("query", "key", "vector"), self.head_dim)
        dims |= {"value": self.value_dim, "edge_query": self.edge_dim, "features": self.edge_dim}
        self.given = {
            name: _filled(tensor, dim)
            for name, dim in dims.items()
            if (tensor := getattr(problem, name)) is not None
        }
        if self.head_dim == self.value_dim and _are_one(problem.key, problem.value):
            self.given["value"] = self.given["key"]  # as in GATv2: one table for both
        if self.is_dot:  # the kernels load a vector in any case
            self.given["vector"] = problem.query.new_zeros(1).expand(self.num_lanes, self.head_dim)
        if problem.edge_key is not None:  # a row for each feature
            rows = _filled(problem.edge_key.transpose(1, 2), self.head_dim)
            self.given["edge_key"] = F.pad(rows, (0, 0, 0, self.edge_dim - rows.shape[1]))
        if problem.features is not None:  # the same for all lanes
            self.given["features"] = self.given["features"].expand(self.num_lanes, -1, -1)
        if problem.bias is not None:
            self.given["bias"] = _filled(problem.bias, self.graph.num_edges)
        self.kept: dict[str, Tensor] = {}

    def forward(self) -> tuple[Results, Results]:
        """Compute outputs and sums of features; and the softmax's numbers, [lanes, targets, 2]."""
        compiled, sums = _compiled(), None
        output = self._new("query", self.value_dim)
        if self.problem.sums_features:
            sums = self._new("query", self.edge_dim)
        softmax = output.new_empty(self.num_lanes, self.num_targets, 2)
        kernel, _, _ = compiled.kernels(self.is_dot, self.head_dim, self.value_dim)
        for lanes in self._groups():
            results = compiled.Results(*(_table(t, lanes) for t in (output, sums, softmax)))
            near = self._near(lanes, "key", "value")
            self._run(kernel, (self._graph(), self._given(lanes, near), results), lanes)
        output = first_channels(output, self.problem.value.shape[2])
        if sums is None:
            sums = output.new_empty(self.num_lanes, self.num_targets, 0)
        sums = first_channels(sums, self.problem.summed_dim)
        return (output, sums), (softmax,)

    def backward(
        self, results: Results, gradients: Gradients, wanted: set[str]
    ) -> dict[str, Tensor]:
        """Compute the gradients of the wanted tensors, by name."""
        compiled = _compiled()
        output, sums, softmax = results
        gradient, sums_gradient = gradients
        if gradient is None:
            gradient = torch.zeros_like(output)
        output, self.given["output"] = (_filled(t, self.value_dim) for t in (output, gradient))
        has_sums = self.problem.sums_features and sums_gradient is not None
        of_sums = [
            _filled(t, self.edge_dim) if has_sums and t is not None else None
            for t in (sums, sums_gradient)
        ]
        found = self._new_gradients(wanted)
        _, by_target, by_source = compiled.kernels(self.is_dot, self.head_dim, self.value_dim)
        for lanes in self._groups():
            shape = lanes.stop - lanes.start, self.graph.num_edges
            near = self._near(lanes, "key", "value") | self._near(lanes, "query", "output")
            pairs = self._buffer("pairs", (*shape, 2))
            signs = None if self.is_dot or self.head_dim == 1 else self._signs(shape)
            tables = {name: _table(tensor, lanes) for name, tensor in found.items()}
            written = compiled.Gradients(
                _table(near.pop("output")),
                _table(of_sums[1], lanes),
                _table(pairs),
                _table(signs),
                *(tables.get(name, _table(None)) for name in compiled.Gradients._fields[4:]),
            )
            arguments = self._graph(*BY_SOURCE), self._given(lanes, near)
            of_results = (_table(t, lanes) for t in (output, of_sums[0], softmax))
            of_targets = *arguments, compiled.Results(*of_results), written
            self._run(by_target, of_targets, lanes, are_together="features" in found)
            if wanted & {"key", "value"}:
                self._run(by_source, (*arguments, written), lanes, by_source=True)
        return {name: self._finished(name, found[name]) for name in wanted}

    def _new_gradients(self, wanted: set[str]) -> dict[str, Tensor]:
        """Allocate the gradients; those of vector and edge_key have a part for each task."""
        zeros, num_parts = self.given["query"].new_zeros, len(self._blocks())
        dims = {"query": self.head_dim, "key": self.head_dim, "value": self.value_dim}
        found = {name: self._new(name, dim) for name, dim in dims.items()}
        found["vector"] = zeros(self.num_lanes, num_parts, self.head_dim)
        if "edge_key" in self.given:
            size = self.edge_dim * self.head_dim
            found["edge_key"] = zeros(self.num_lanes, num_parts, size)
        if "edge_query" in self.given:
            found["edge_query"] = self._new("query", self.edge_dim)
        if "features" in wanted:
            of_all = zeros(self.graph.num_edges, self.edge_dim)
            found["features"] = of_all.expand(self.num_lanes, -1, -1)
        if "bias" in wanted:
            found["bias"] = zeros(self.num_lanes, self.graph.num_edges)
        return found

    def _finished(self, name: str, gradient: Tensor) -> Tensor:
        """Return the gradient in the shape of the problem's tensor."""
        shape = getattr(self.problem, name).shape
        if name in ("vector", "edge_key"):
            gradient = gradient.sum(dim=1)
        if name == "edge_key":
            gradient = gradient.unflatten(1, (self.edge_dim, self.head_dim)).transpose(1, 2)
            gradient = gradient[:, : shape[1]]
        elif name == "features":
            gradient = gradient[0]
        return first_channels(gradient, shape[-1])

    def _new(self, name: str, dim: int) -> Tensor:
        """Allocate [lanes, nodes, dim] for the nodes of that tensor; the lanes of a node are
        contiguous, as layers read them."""
        like = self.given[name]
        return like.new_empty(like.shape[1], self.num_lanes, dim).transpose(0, 1)

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return memory that all groups of lanes share, because allocating it costs more."""
        count = math.prod(shape)
        kept = self.kept.get(name)
        if kept is None or len(kept) < count:
            kept = self.kept[name] = torch.empty(count, dtype=torch.float32, device="cpu")
        return kept[:count].view(shape)

    def _signs(self, shape: tuple[int, int]) -> Tensor:
        """Allocate a bit for each lane, edge and channel, in bytes."""
        num_bytes = self.head_dim // 8
        bits = self._buffer("signs", (-(-shape[0] * shape[1] * num_bytes // 4),))
        return bits.view(torch.uint8)[: shape[0] * shape[1] * num_bytes].view(*shape, num_bytes)

    def _near(self, lanes: slice, *names: str) -> dict[str, Tensor]:
        """Return the lanes' rows of given tensors that are read together, in random order.

        They are copied to contiguous memory if each row is read several times and they are spread
        over much memory, or would fill most of the last cache. A table that is both key and value
        is copied once.
        """
        if names == ("key", "value") and self.given["key"] is self.given["value"]:
            return dict.fromkeys(names, self._near(lanes, "key")["key"])
        found = {name: self.given[name][lanes] for name in names}
        tasks, count = [], lanes.stop - lanes.start
        are_vectors = all(rows.shape[2] % 8 == 0 for rows in found.values())
        for together in [names] if are_vectors else [(name,) for name in names]:
            some = [found[name] for name in together]
            dims, num_nodes = [rows.shape[2] for rows in some], some[0].shape[1]
            is_large = 4 * num_nodes * sum(dims) > caches().last // 2
            if self.graph.num_edges < FEW * num_nodes or not (
                is_large or any(map(_is_spread, some))
            ):
                continue
            copies = self._buffer("_".join(together), (count, num_nodes, sum(dims))).split(
                dims, dim=2
            )
            for name, rows, copied in zip(together, some, copies, strict=True):
                copy = partial(_compiled().copy(), _table(rows), _table(copied), rows.shape[2])
                tasks += [partial(copy, 0, num_nodes, lane, lane + 1) for lane in range(count)]
                found[name] = copied
        run_tasks(tasks)
        return found

    def _groups(self) -> Iterator[slice]:
        """Yield the groups of lanes that are computed at once."""
        size = max(1, min(self.num_lanes, GROUP // max(1, self.graph.num_edges)))
        for first in range(0, self.num_lanes, size):
            yield slice(first, min(first + size, self.num_lanes))

    def _graph(self, *names: str) -> Any:
        """Return the addresses of the edges in the order of targets, and of the named tensors."""
        graph = _compiled().Graph
        for name in ("offsets", "source", *names):
            self.kept[name] = getattr(self.graph, name).contiguous()
        addresses = (
            self.kept[name].data_ptr() if name in self.kept else 0 for name in graph._fields[:-3]
        )
        return graph(*addresses, self.graph.num_edges - 1, self._at_once(), self._is_large())

    def _is_large(self) -> bool:
        """Return whether a lane's table is too large for a core's own cache, so that rows, which
        are read in random order, should be prefetched."""
        num_nodes = max(self.graph.num_sources, self.num_targets)
        return 4 * num_nodes * max(self.head_dim, self.value_dim) > caches().core // 2

    def _at_once(self) -> int:
        """Return the largest number of edges that are computed at once, in whole vectors."""
        return multiple_of_8(_compiled().CHUNK + self.graph.largest_degree)

    def _given(self, lanes: slice, near: dict[str, Tensor]) -> Any:
        """Return the given tensors of these lanes, with the copies `near` in their place."""
        compiled, problem, keep = _compiled(), self.problem, 1 - self.problem.dropout_p
        tables = {name: _table(tensor, lanes) for name, tensor in self.given.items()}
        tables |= {name: _table(rows) for name, rows in near.items()}
        none = _table(None)
        return compiled.Given(
            *(tables.get(name, none) for name in compiled.Given._fields[:8]),
            self.edge_dim // 8,
            compiled.float32(problem.scale),
            compiled.float32(problem.negative_slope or 0.0),
            lanes.start,
            0 if problem.seed is None else int(problem.seed),
            min(round(keep * 2**32), 2**32 - 1),
            compiled.float32(1 / keep),
        )

    def _run(
        self,
        kernel: Callable[..., None],
        arguments: tuple[Any, ...],
        lanes: slice,
        *,
        by_source: bool = False,
        are_together: bool = False,
    ) -> None:
        """Run the kernel for blocks of nodes, in a task per lane unless lanes are computed
        together."""
        count, blocks = lanes.stop - lanes.start, self._blocks(by_source=by_source)
        if are_together or self._is_alone():
            spans = [(0, count)]
        else:
            spans = [(lane, lane + 1) for lane in range(count)]

        def task(*where: int) -> None:
            size = (3 + self.head_dim) * self._at_once() + self.edge_dim
            scratch = torch.empty(size, dtype=torch.float32, device="cpu")  # not torch's defaults
            kernel(*arguments, scratch.data_ptr(), *where)

        run_tasks(
            [
                partial(task, part, first, last, *span)
                for span in spans
                for part, (first, last, _, _) in enumerate(blocks)
            ]
        )

    def _blocks(self, *, by_source: bool = False) -> list[tuple[int, int, int, int]]:
        graph = self.graph
        if self._is_alone():
            num_nodes = graph.num_sources if by_source else graph.num_targets
            return [(0, num_nodes, 0, graph.num_edges)]
        lanes = next(self._groups())
        num_blocks = -(-TASKS * torch.get_num_threads() // (lanes.stop - lanes.start))
        return graph.blocks(max(BLOCK, -(-graph.num_edges // num_blocks)), by_source=by_source)

    def _is_alone(self) -> bool:
        """Return whether one thread computes everything, since waking another takes as long."""
        work = self.graph.num_edges * self.num_lanes * (self.head_dim + self.value_dim)
        return work <= ALONE


@cache
def _compiled() -> Any:
    """Return the module of the kernels, imported late because numba takes half a second."""
    from attnkit.core.kernels.edges import numba_kernels

    return numba_kernels


def _is_spread(rows: Tensor) -> bool:
    """Return whether rows [lanes, nodes, channels] are not contiguous, and are spread over several
    times the memory of a core's own cache."""
    spread = 4 * rows.shape[1] * rows.stride(1)
    return rows.stride(1) != rows.shape[2] and spread > 4 * caches().core


def _are_one(first: Tensor, second: Tensor) -> bool:
    """Return whether the tensors are the same view of the same memory."""
    return first.data_ptr() == second.data_ptr() and (first.shape, first.stride()) == (
        second.shape,
        second.stride(),
    )


def _filled(tensor: Tensor, dim: int) -> Tensor:
    """Return the tensor zero-padded to `dim` contiguous channels."""
    tensor = with_channels(tensor, dim)
    return tensor if tensor.stride(-1) == 1 or dim == 1 else tensor.contiguous()


def _table(tensor: Tensor | None, lanes: slice = slice(None)) -> Any:
    """Return the lanes of a tensor [lanes, rows, channels] or [lanes, channels] as kernels read it;
    None is a table at address 0."""
    table = _compiled().Table
    if tensor is None:
        return table(0, 0, 0)
    tensor = tensor[lanes]
    size = tensor.element_size()
    row = size * tensor.stride(1) if tensor.ndim == 3 else 0
    return table(tensor.data_ptr(), size * tensor.stride(0), row)
