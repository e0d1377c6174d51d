"""The edges of a graph as a mask, the cache of those made from a tensor, and features of edges."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from attnkit.core.arguments import as_tensor, whole
from attnkit.core.masks.adjacency import Adjacency
from attnkit.core.masks.base import Mask, register
from attnkit.core.masks.kept import (
    Made,
    as_counted,
    has_values,
    kept,
    memory_of,
    remembered,
    stream_of,
)
from attnkit.core.scores.kinds import moved


@dataclass(frozen=True, eq=False)
class Edges(Mask):
    """The edges of a graph: target nodes see the source nodes of their edges, as messages flow in
    PyG.

    If `Edges` is the whole mask, an edge given twice counts twice, as in message passing. Inside
    `&`, `|` and `~` masks are boolean, and it counts once.

    Sorting the edges can take longer than attending once, so reuse the object for all layers, heads
    and epochs; layers that are given `edge_index` itself do so. The object keeps the sorted edges
    and sorts them again after the tensor was written to; on a GPU only writes by operators of torch
    are noticed.

    edge_index: integers [2, edges], source (key) in row 0, target (query) in row 1, such as PyG's
        `EdgeIndex`; or a sparse matrix [targets, sources] (PyG's `adj_t`), whose values are
        ignored.
    num_nodes: the number of targets (queries), or (sources, targets) as PyG's `size`; may be left
        out for a sparse matrix.
    num_sources: the number of sources (keys); None: `num_nodes`.

    Raises:
        TypeError, ValueError, IndexError: edge_index has another type or shape, or a node's index
            is out of range.
    """

    edge_index: Annotated[Tensor, "2 edges", int]
    num_nodes: int | tuple[int, int] | None = None
    num_sources: int | None = None

    looped_from: ClassVar[Annotated[Tensor, "2 _", int] | None] = None
    """Set on the result of `with_loops`: the `edge_index` that the self-loops were added to."""
    proper: ClassVar[Annotated[Tensor, "_", int] | None] = None
    """Set on the result of `with_loops`: the indices of the edges there that are not self-loops;
    they come first here."""
    never_repeats: ClassVar[bool] = False
    """Whether it is known in advance that no edge is given more than once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "edge_index", as_tensor("edge_index", self.edge_index))
        if isinstance(self.num_nodes, tuple | list):
            self._read_pair(*self.num_nodes)
        if self.edge_index.layout is not torch.strided:
            self._read_sparse(self.edge_index)
        elif type(self.edge_index) is not Tensor and hasattr(self.edge_index, "as_tensor"):
            object.__setattr__(self, "edge_index", self.edge_index.as_tensor())
        edges = self.edge_index
        if edges.is_floating_point() or edges.is_complex() or edges.dtype == torch.bool:
            raise TypeError(f"edge_index: expected integers [2, edges], got {edges.dtype}")
        if edges.dtype not in (torch.int32, torch.int64):  # torch cannot index with other dtypes
            edges = edges.long()
            object.__setattr__(self, "edge_index", edges)
        if edges.ndim != 2 or edges.shape[0] != 2:
            hint = ", transposed?" if edges.ndim == 2 and edges.shape[1] == 2 else ""
            raise ValueError(
                f"edge_index: expected the shape [2, edges], got {list(edges.shape)}{hint}"
            )
        for name in ("num_nodes", "num_sources"):
            given = getattr(self, name)
            if isinstance(given, torch.SymInt) or (given is None and name == "num_sources"):
                continue
            number = None if isinstance(given, Tensor) else whole(given)
            if number is None:
                raise TypeError(f"{name}: expected the number of nodes, got {given!r} (Edges)")
            object.__setattr__(self, name, number)
        self._check_range()

    def _check_range(self) -> None:
        """Raise IndexError if a node's index is out of range. Reading the numbers waits for a GPU,
        so they are read again there only after torch has counted a write."""
        edges = self.edge_index
        if torch.compiler.is_compiling() or edges.numel() == 0 or edges.is_meta:
            return
        counted = None if edges.is_cpu or edges.is_inference() else as_counted(edges)
        if counted is not None and vars(self).get("_checked") == counted:
            return
        source, target = edges
        bounds = torch.stack([*source.aminmax(), *target.aminmax()]).tolist()
        names = zip(("source", "target"), (bounds[:2], bounds[2:]), self.sizes[::-1], strict=True)
        for name, (low, high), size in names:
            if low < 0 or high >= size:
                raise IndexError(
                    f"edge_index: the {name} nodes go from {low} to {high}, "
                    f"expected 0 to {size - 1}"
                )
        object.__setattr__(self, "_checked", counted)

    def _read_pair(self, *sizes: int) -> None:
        if len(sizes) != 2 or self.num_sources is not None:
            raise ValueError(
                "num_nodes: expected a number, or (sources, targets) without num_sources, "
                f"got {sizes} and num_sources={self.num_sources} (Edges)"
            )
        object.__setattr__(self, "num_nodes", sizes[1])
        object.__setattr__(self, "num_sources", sizes[0])

    def _read_sparse(self, matrix: Tensor) -> None:
        if matrix.ndim != 2:
            raise ValueError(
                f"edge_index: a sparse matrix is [targets, sources], got {list(matrix.shape)}"
            )
        for name, size in (("num_nodes", matrix.shape[0]), ("num_sources", matrix.shape[1])):
            given = getattr(self, name)
            if given not in (None, size):
                raise ValueError(f"{name}: the sparse matrix has {size}, got {given}")
            object.__setattr__(self, name, size)
        target, source = matrix.detach().to_sparse_coo().coalesce().indices()
        object.__setattr__(self, "edge_index", torch.stack([source, target]))

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of targets and of sources."""
        assert self.num_nodes is not None
        assert not isinstance(self.num_nodes, tuple)  # isinstance of int fails on a traced size
        return self.num_nodes, self.num_nodes if self.num_sources is None else self.num_sources

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1]

    @property
    def adjacency(self) -> Adjacency:
        """The sorted edges, as kernels read them."""
        return self._kept("_adjacency", self._sort)

    def check_nodes(self) -> None:
        """Raise IndexError if a node's index is out of range by now, on a CPU; for code that
        indexes with the numbers themselves, which would take −1 for the last node."""
        if self.edge_index.is_cpu and has_values(self.edge_index.device):
            self._check_range()

    def _sort(self) -> Adjacency:
        self._check_range()  # the numbers may have changed since __post_init__
        return Adjacency.of(self.edge_index, *self.sizes)

    @property
    def has_repeated(self) -> bool:
        """Whether an edge is given more than once."""
        return not self.never_repeats and self._kept("_has_repeated", self._find_repeated)

    def _find_repeated(self) -> bool:
        source, target = self.edge_index.long()
        return len((target * self.sizes[1] + source).unique()) < self.num_edges

    @property
    def without_loops(self) -> Annotated[Tensor, "_", int]:
        """The indices of the edges that are not self-loops."""
        places = self.with_loops.proper
        assert places is not None
        return places

    @property
    def with_loops(self) -> "Edges":
        """The edges that are not self-loops, in their order, then one self-loop for each node that
        is both source and target; made once and kept, as the sorted edges are."""
        return self._kept("_with_loops", self._add_loops)

    def _add_loops(self) -> "Edges":
        self._check_range()  # as in _sort; self-loops with a wrong index would be dropped silently
        loops = torch.arange(min(self.sizes), device=self.edge_index.device).expand(2, -1)
        # an operator, because compiled code does not know how many edges it returns
        is_compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        places = (_without_loops if is_compiled else _proper)(self.edge_index)
        proper = self.edge_index[:, places]
        looped = Edges(torch.cat([proper, loops.to(proper.dtype)], dim=1), *self.sizes)
        object.__setattr__(looped, "looped_from", self.edge_index)
        object.__setattr__(looped, "proper", places)
        return looped

    def _kept(self, name: str, make: Callable[[], Made]) -> Made:
        device, is_private = self.edge_index.device, self.looped_from is not None
        return kept(self, name, (), device, make, in_programs=True, is_private=is_private)

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        if (num_queries, num_keys) != self.sizes:
            raise ValueError(
                f"mask: Edges has {self.sizes[0]} targets and {self.sizes[1]} sources, "
                f"got {num_queries} queries and {num_keys} keys"
            )

    def allows(self, batch, head, query, key, num_queries, num_keys) -> Tensor:
        if torch.compiler.is_exporting():  # ONNX has no searchsorted
            return self.dense(num_queries, num_keys, query.device)[0, 0][query, key]
        self.check_nodes()
        source, target = self.edge_index.to(query.device).long()
        pairs = (target * num_keys + source).sort().values
        wanted = query * num_keys + key
        if pairs.shape[0] == 0:
            return wanted < 0
        return pairs[torch.searchsorted(pairs, wanted).clamp(max=pairs.shape[0] - 1)] == wanted

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        self.check_nodes()
        source, target = self.edge_index.to(device)
        allowed = torch.zeros(num_queries, num_keys, dtype=torch.bool, device=device)
        allowed[target, source] = True
        return allowed[None, None]


def _proper(edge_index: Tensor) -> Tensor:
    source, target = edge_index
    return (source != target).nonzero().squeeze(1)


@torch.library.custom_op("attnkit::without_loops", mutates_args=())
def _without_loops(edge_index: Tensor) -> Tensor:
    return _proper(edge_index)


@_without_loops.register_fake
def _(edge_index):
    return edge_index.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


def in_callers_order(rows: Tensor, looped: Edges) -> Tensor:
    """Return rows of the edges of `looped`, a result of `with_loops`, in the order of the caller's
    edges, followed by the rows of the added self-loops.

    The rows of the caller's own self-loops, which `with_loops` replaced, are 0.
    """
    assert looped.looped_from is not None
    assert looped.proper is not None
    num_edges = looped.looped_from.shape[1]
    loops = torch.arange(min(looped.sizes), device=rows.device) + num_edges
    places = torch.cat([looped.proper, loops])
    result = rows.new_zeros(num_edges + len(loops), *rows.shape[1:])
    return result.index_copy(0, places, rows)


def remembered_edges(edge_index: Tensor, num_targets: int, num_sources: int) -> Edges:
    """Return the `Edges` of this tensor, the same object at every call, so that they are sorted
    once.

    The cache holds the edges of the last 64 tensors, each as long as the tensor object lives. The
    kernel `edges_numba` keeps 2.6 times the memory of the tensor, 4.3 times with self-loops;
    `edges`, which keeps tables for each head, up to 25 times. New edges are made for other sizes
    and after the tensor was written to. On a CPU every write is noticed, since `Edges` compares the
    numbers. On a GPU that would mean waiting for it, so only the tensor's version counter and the
    address of its memory are compared: writes through `.data`, DLPack or another library are not
    noticed. On a GPU new edges are also made for another stream, which might read them too early.

    Nothing is cached inside torch.compile, export, tracing, torch.func and the capture of CUDA
    graphs, nor for a tensor that must be converted first (16-bit integers, subclasses of the
    user's), nor for a tensor on a GPU that is sparse or was made in inference mode.

    Raises:
        TypeError, ValueError, IndexError: as `Edges`.
    """
    sizes = num_targets, num_sources
    memory = memory_of(edge_index)
    if memory is None:
        return Edges(edge_index, *sizes)
    if edge_index.layout is not torch.strided:  # `Edges` makes a copy of these
        kind = *sizes, edge_index.layout, edge_index.shape
        return remembered(edge_index, memory, kind, lambda: Edges(edge_index, *sizes))
    key = *sizes, stream_of(memory[0]), as_counted(memory[0])
    # `Edges` itself compares the numbers; it holds the memory, so that its address is not reused
    return remembered(edge_index, [], key, lambda: Edges(memory[0].detach(), *sizes))


@dataclass(frozen=True, eq=False)
class EdgeFeatures:
    """Features of edges, which are added to the keys, the values and the scores.

        score_ij = score(q_i, k_j + W_k e_ij) + b_ij,   value_ij = v_j + W_v e_ij

    features: e, in the order of `Edges.edge_index`; None: no features.
    key_weight: W_k; None: features are not added to the keys.
    value_weight: W_v; None: features are not added to the values.
    bias: b, in the order of `Edges.edge_index`; None: 0.
    """

    features: Annotated[Tensor, "edges edge_dim"] | None = None
    key_weight: Annotated[Tensor, "heads head_dim edge_dim"] | None = None
    value_weight: Annotated[Tensor, "heads value_dim edge_dim"] | None = None
    bias: Annotated[Tensor, "#heads edges"] | None = None

    def check(self, edges: Edges, num_heads: int, head_dim: int, value_dim: int) -> None:
        """Raise ValueError or TypeError if a tensor does not fit the edges and these sizes."""
        for name in ("features", "key_weight", "value_weight", "bias"):
            tensor = getattr(self, name)
            if tensor is None and (name != "features" or self._is_bias_alone):
                continue
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TypeError(
                    f"{name}: expected a floating-point tensor, got {given} (EdgeFeatures)"
                )
            if tensor.device != edges.edge_index.device:
                raise ValueError(
                    f"{name}: is on {tensor.device}, but the edges are on "
                    f"{edges.edge_index.device} (EdgeFeatures)"
                )
        if self.bias is not None and tuple(self.bias.shape) not in (
            (num_heads, edges.num_edges),
            (1, edges.num_edges),
        ):
            raise ValueError(
                f"bias: expected [heads, edges] = {[num_heads, edges.num_edges]}, "
                f"got {list(self.bias.shape)} (EdgeFeatures)"
            )
        if self.features is None:
            return
        if self.features.ndim != 2 or len(self.features) != edges.num_edges:
            raise ValueError(
                f"edge_features: expected [{edges.num_edges} edges, edge_dim], "
                f"got {list(self.features.shape)}"
            )
        edge_dim = self.features.shape[1]
        for name, dim in (("key_weight", head_dim), ("value_weight", value_dim)):
            weight = getattr(self, name)
            if weight is not None and tuple(weight.shape) != (num_heads, dim, edge_dim):
                raise ValueError(
                    f"{name}: expected [heads, dim, edge_dim] = {[num_heads, dim, edge_dim]}, "
                    f"got {list(weight.shape)} (EdgeFeatures)"
                )

    @property
    def _is_bias_alone(self) -> bool:
        return self.bias is not None and self.key_weight is None and self.value_weight is None

    def to(self, dtype: torch.dtype) -> "EdgeFeatures":
        """Return the same features in another dtype."""
        return moved(self, dtype)


register(Edges)
register(EdgeFeatures)
