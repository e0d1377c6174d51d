"""Attention over edges on CUDA by Triton kernels: their limits and their launches.

The forward keeps the output and the log-sum-exp of each target and no tensor of edges. The backward
computes the weights again, once in the order of targets for the query's gradient and once in the
order of sources for those of key and value. No two programs add to the same number, so results are
bitwise the same from run to run.
"""

import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs, in_high_precision
from attnkit.core.kernels.base import add_sink_, computes_by_operators, sink_gradient
from attnkit.core.kernels.edges.edges import EdgesKernel
from attnkit.core.kernels.edges.problem import EdgeProblem, Gradients, Results, solve
from attnkit.core.masks.adjacency import SplitNodes
from attnkit.core.masks.edges import Edges
from attnkit.core.operators.precision import no_autocast
from attnkit.core.scores.additive import Additive
from attnkit.core.scores.kinds import ScaledDot

CHUNK = 256  # most edges that one program computes
WIDTH = 256  # most channels that one program computes, over its heads
TILE = 512  # numbers of a tile of edges × heads × channels, which one warp holds in registers
LARGEST_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonEdgesKernel(EdgesKernel):
    """The kernel for `Edges` on CUDA by Triton."""

    name = "edges_triton"

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        yield from super().reasons(inputs)
        if not isinstance(inputs.mask, Edges):
            return
        if torch.compiler.is_compiling():
            yield "cannot be traced by torch.compile"
        elif not _runs_on(inputs.query.device):
            yield "needs Triton and a GPU of compute capability 8.0 or newer"
        if inputs.edge_features is not None:
            yield "cannot read edge features"
        if inputs.query.dtype not in DTYPES:
            yield f"needs float32, bfloat16 or float16, got {inputs.query.dtype}"
        dim = max(inputs.dot_dim or inputs.query.shape[3], inputs.value.shape[3])
        if dim > LARGEST_DIM:
            yield f"needs a head_dim of at most {LARGEST_DIM}, got {dim}"

    def compute(self, inputs: Inputs) -> Tensor:
        if computes_by_operators():
            return super().compute(inputs)
        with no_autocast(inputs.query):
            return solve(self, _problem_of(inputs))[0]

    def forward(self, problem: EdgeProblem) -> tuple[Results, Results]:
        """Compute the output; and the log-sum-exp of each target."""
        with torch.cuda.device_of(problem.query):  # Triton launches on the current device
            output, lse = _Run(problem).forward()
        if problem.sink is not None:
            lse = add_sink_(output, lse, problem.sink)
        return (output,), (lse,)

    def backward(
        self, problem: EdgeProblem, results: Results, gradients: Gradients, wanted: set[str]
    ) -> dict[str, Tensor]:
        (output, lse), (gradient,), run = results, gradients, _Run(problem)
        assert gradient is not None
        with torch.cuda.device_of(gradient):
            found, delta = run.target_gradients(output, lse, gradient, "vector" in wanted)
            if wanted & {"key", "value"}:
                found |= run.source_gradients(lse, gradient, delta)
        if "sink" in wanted:
            assert problem.sink is not None
            found["sink"] = sink_gradient(problem.sink, lse, (output, gradient))
        return found


def _problem_of(inputs: Inputs) -> EdgeProblem:
    """Make a problem whose tensors are [batch, heads, nodes, channels] and whose vector is [batch,
    heads, 1, channels]. Key heads are not repeated; the dtype is kept where that loses no
    digits."""
    assert isinstance(inputs.mask, Edges)
    adjacency, score, value = inputs.mask.adjacency, inputs.score, inputs.value
    scale, slope, vector, seed = 1.0, None, None, None
    if isinstance(score, Additive):
        slope = score.negative_slope
        vector = score.vector.float().expand(*inputs.query.shape[:2], -1)[:, :, None]
    else:
        if not isinstance(score, ScaledDot):  # the conversion loses digits in low precision
            inputs = in_high_precision(inputs)
        inputs = inputs.as_scaled_dot()
        scale = inputs.scale
    if inputs.dropout_p:  # drawn on the device, so that the CPU does not wait
        seed = torch.randint(2**62, (1,), device=inputs.query.device)
    tensors = inputs.query, inputs.key, value, vector
    sink = None if inputs.sink is None else inputs.sink[:, None, None]
    return EdgeProblem(adjacency, scale, slope, False, inputs.dropout_p, seed, *tensors, sink=sink)


@cache
def _runs_on(device: torch.device) -> bool:
    if device.type == "cuda":
        serves_it = torch.cuda.get_device_capability(device) >= (8, 0)
    else:  # Triton's own variable, with which its interpreter runs kernels on CPU tensors
        serves_it = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return serves_it and find_spec("triton") is not None


class _Table(NamedTuple):
    """A tensor [batch, heads, nodes, channels] as kernels read it: a pointer and strides."""

    pointer: Tensor
    batch: int
    head: int
    node: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Table":
        if tensor.shape[3] > 1 and tensor.stride(3) != 1:
            tensor = tensor.contiguous()
        return cls(tensor, *tensor.stride()[:3])


class _Tables(NamedTuple):
    query: _Table
    key: _Table
    value: _Table
    vector: _Table | None


class _Sums(NamedTuple):
    """Tables for sums over a node's edges: `whole`, [batch, heads, nodes, channels], and `parts` of
    split nodes, [batch, heads, slots, channels]."""

    whole: _Table
    parts: _Table

    @classmethod
    def of(cls, tensor: Tensor, num_slots: int) -> "_Sums":
        batch, heads, _, channels = tensor.shape
        shape = (batch, heads, num_slots, channels)
        parts = tensor.new_empty(shape, dtype=torch.float32)
        return cls(_Table.of(tensor), _Table.of(parts))


class _Numbers(NamedTuple):
    num_heads: int
    num_batches: int
    groups: int  # heads that share a head of keys
    scale: float
    slope: float
    dropout_p: float
    seed: Tensor | None  # None: no dropout


class _Run:
    """The launches of the kernels for one problem."""

    def __init__(self, problem: EdgeProblem) -> None:
        query, key, value, vector = problem.query, problem.key, problem.value, problem.vector
        self.problem, self.adjacency = problem, problem.adjacency
        self.tables = _Tables(
            _Table.of(query),
            _Table.of(key),
            _Table.of(value),
            None if vector is None else _Table.of(vector),
        )
        self.numbers = _Numbers(
            num_heads=query.shape[1],
            num_batches=query.shape[0],
            groups=query.shape[1] // key.shape[1],
            scale=problem.scale,
            slope=float(problem.negative_slope or 0.0),
            dropout_p=problem.dropout_p,
            seed=problem.seed,
        )
        self.score = "dot"
        if vector is not None:
            self.score = "tanh" if problem.negative_slope is None else "leaky_relu"
        self.channels = _power_of_2(max(key.shape[3], value.shape[3]))  # per head, in tiles

    def launch(self, kernel: Any, num_chunks: int, num_heads: int, *arguments: object) -> None:
        """Launch the kernel for each chunk of each batch item, some heads at a time."""
        heads = _heads_at_once(num_heads, self.channels)
        _launch(
            kernel,
            self.numbers.num_batches * num_heads // heads * num_chunks,
            *arguments,
            self.numbers,
            SCORE=self.score,
            DIM=self.problem.key.shape[3],
            VALUE_DIM=self.problem.value.shape[3],
            HEADS=heads,
            BLOCK=_block(heads * self.channels),
        )

    def forward(self) -> tuple[Tensor, Tensor]:
        """Compute the output, and the log-sum-exp of each target, [batch, heads, targets, 1]."""
        from attnkit.core.kernels.edges.triton_kernels import forward_kernel, merge_kernel

        query, value = self.problem.query, self.problem.value
        chunks, split, num_slots = self.adjacency.chunks(CHUNK)
        output = _empty_like(query, value.shape[3], value.dtype)
        lse = _empty_like(query, 1, torch.float32)
        sums, lse_sums = _Sums.of(output, num_slots), _Sums.of(lse, num_slots)
        arguments = (self.tables, self.adjacency.source, chunks, sums, lse_sums)
        self.launch(forward_kernel, len(chunks.node), query.shape[1], *arguments)
        _put_together(merge_kernel, output, split, sums, lse_sums)
        return output, lse

    def target_gradients(
        self, output: Tensor, lse: Tensor, gradient: Tensor, wants_vector: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Compute the gradients of query and vector, and delta, which `source_gradients` needs."""
        from attnkit.core.kernels.edges.triton_kernels import sum_kernel, target_gradients_kernel

        batch, heads, _, dim = self.problem.query.shape
        chunks, split, num_slots = self.adjacency.chunks(CHUNK)
        for_query, delta = _empty_like(self.problem.query, dim), torch.empty_like(lse)
        parts = lse.new_empty(batch, heads, len(chunks.node), dim) if wants_vector else None
        sums = _Sums.of(for_query, num_slots)
        self.launch(
            target_gradients_kernel,
            len(chunks.node),
            heads,
            self.tables,
            self.adjacency.source,
            chunks,
            *(_Table.of(tensor) for tensor in (output, lse, gradient, delta)),
            sums,
            None if parts is None else _Table.of(parts),
        )
        _put_together(sum_kernel, for_query, split, sums)
        found = {"query": for_query}
        if parts is not None:
            found["vector"] = parts.sum(dim=2, keepdim=True)
        return found, delta

    def source_gradients(self, lse: Tensor, gradient: Tensor, delta: Tensor) -> dict[str, Tensor]:
        """Compute the gradients of key and value."""
        from attnkit.core.kernels.edges.triton_kernels import source_gradients_kernel, sum_kernel

        chunks, split, num_slots = self.adjacency.chunks(CHUNK, by_source=True)
        key, value = self.problem.key, self.problem.value
        found = {"key": _empty_like(key, key.shape[3]), "value": _empty_like(value, value.shape[3])}
        sums = [_Sums.of(result, num_slots) for result in found.values()]
        self.launch(
            source_gradients_kernel,
            len(chunks.node),
            key.shape[1],
            self.tables,
            self.adjacency.target_by_source,
            self.adjacency.by_source,
            chunks,
            *(_Table.of(tensor) for tensor in (lse, gradient, delta)),
            *sums,
        )
        for result, result_sums in zip(found.values(), sums, strict=True):
            _put_together(sum_kernel, result, split, result_sums)
        return found


def _put_together(kernel: Any, whole: Tensor, split: SplitNodes, *sums: _Sums) -> None:
    """Compute the results of nodes with several chunks from their parts."""
    batch, heads, _, dim = whole.shape
    sizes = {"DIM": dim, "BLOCK": _block(_power_of_2(dim))}
    _launch(kernel, batch * heads * len(split.node), *sums, split, heads, batch, **sizes)


def _launch(kernel: Any, num_programs: int, *arguments: object, **constants: object) -> None:
    if num_programs:
        kernel[(num_programs,)](*arguments, **constants, num_warps=1)


def _heads_at_once(num_heads: int, channels: int) -> int:
    """Return the largest power of two that divides the heads, within `WIDTH` channels."""
    return min(num_heads & -num_heads, max(1, WIDTH // channels))


def _block(channels: int) -> int:
    """Return the number of edges of a tile."""
    return max(1, min(32, TILE // channels))


def _power_of_2(size: int) -> int:
    """Return the next power of two."""
    return 1 << (size - 1).bit_length()


def _empty_like(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate [batch, heads, nodes, dim] with contiguous heads of a node, as layers read them."""
    batch, heads, nodes, _ = tensor.shape
    return tensor.new_empty(batch, nodes, heads, dim, dtype=dtype).transpose(1, 2)
