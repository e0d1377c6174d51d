"""Observation of the attention of torch_geometric's convolutions, in the caller's edge order.

Convolutions with attention call `torch_geometric.utils.softmax` by the name `softmax` of their
Python module, after self-loops were replaced or all edge types were joined to one list.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from inspect import signature, unwrap
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from attnkit.core.capture.calls import EdgeCall
from attnkit.core.contexts import Opened, shared

EDGE_ARGUMENTS = ("edge_index", "edge_index_dict", "hyperedge_index")


def attention_convolutions(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's convolutions that may call torch_geometric's softmax; empty if
    torch_geometric is not imported."""
    if "torch_geometric.nn" not in sys.modules:
        return {}
    passing = sys.modules["torch_geometric.nn"].MessagePassing
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, passing) and _homes(module)
    }


@contextmanager
def softmax_replaced(
    convolutions: list[nn.Module], make: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
) -> Iterator[None]:
    """Make the convolutions call `make(softmax)` in the place of softmax in the block."""
    homes = {home for module in convolutions for home in _homes(module)}
    with ExitStack() as stack:
        for home in homes:
            stack.enter_context(shared(sys.modules[home], partial(_softmax_patched, home)))
        stack.enter_context(_REPLACED.opened((homes, make)))
        yield


_REPLACED: Opened[tuple[set[str], Callable]] = Opened("softmax of torch_geometric")


def _softmax_patched(home: str) -> AbstractContextManager[Any]:
    original = sys.modules[home].softmax

    @wraps(original)
    def softmax(*args: Any, **kwargs: Any) -> Tensor:
        function = original
        for homes, make in _REPLACED.get():
            if home in homes:
                function = make(function)
        return function(*args, **kwargs)

    return patch.object(sys.modules[home], "softmax", softmax)


@contextmanager
def watch_convolutions(
    convolutions: dict[str, nn.Module], note: Callable[[EdgeCall], None]
) -> Iterator[None]:
    """Call `note` with each attention of these convolutions in the block.

    Their output does not change. `EdgeCall.seen_in` is the result of the softmax in the caller's
    order, from which the output is computed.
    """

    def innermost() -> _Run | None:
        """Return the innermost run of this watch."""
        return next((run for run in reversed(_runs.get()) if run.watch is watched), None)

    def enter(module: nn.Module, args: tuple, kwargs: dict, *, name: str) -> None:
        if any(make is watched for _, make in _REPLACED.get()):
            bound = signature(module.forward).bind(*args, **kwargs).arguments
            _runs.set((*_runs.get(), _Run(watched, name, module, bound)))

    def leave(module: nn.Module, args: tuple, output: object) -> None:
        run = innermost()
        if run is not None and run.module is module:
            _runs.set(tuple(other for other in _runs.get() if other is not run))

    def edges_seen(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        run = innermost()
        if run is not None and run.module is module:
            run.edges_seen(inputs[0])

    def watched(softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            weights = softmax(src, *args, **kwargs)
            run = innermost()
            if run is None:
                return weights
            calls, weights = run.calls_of(weights)
            for edge_call in calls:
                note(edge_call)
            return weights

        return call

    with ExitStack() as stack:
        for name, module in convolutions.items():
            conv: Any = module
            for handle in (
                conv.register_forward_pre_hook(partial(enter, name=name), with_kwargs=True),
                conv.register_forward_hook(leave, always_call=True),
                conv.register_propagate_forward_pre_hook(edges_seen),
                conv.register_edge_update_forward_pre_hook(edges_seen),
            ):
                stack.callback(handle.remove)
        stack.enter_context(softmax_replaced(list(convolutions.values()), watched))
        yield


class _Run:
    """One forward of one convolution: the caller's edges, and the edges that it uses."""

    def __init__(
        self, watch: object, name: str, module: nn.Module, arguments: dict[str, Any]
    ) -> None:
        self.watch = watch
        self.name = name
        self.module = module
        self.nodes = arguments.get("x_dict", arguments.get("x"))
        given = next((arguments[name] for name in EDGE_ARGUMENTS if name in arguments), None)
        self.given = {None: given} if not isinstance(given, dict) else given
        self.passes = 0
        self.used: Tensor | None = None

    def edges_seen(self, edges: Any) -> None:
        self.used = self._source_target(edges)
        self.passes += 1

    def calls_of(self, weights: Tensor) -> tuple[list[EdgeCall], Tensor]:
        """Return the calls with these weights, and the weights again, computed from the calls'."""
        given = {kind: self._source_target(edges) for kind, edges in self.given.items()}
        if None in given:
            kinds = [None]
        elif sum(edges.shape[1] for edges in given.values()) == len(weights):
            kinds = list(given)  # HGT: all types in one list, one after the other
        else:
            kinds = [list(given)[self.passes - 1]]  # HAN: type after type
        if len(kinds) > 1:
            used = list(given.values())
        else:
            used = [given[kinds[0]] if self.used is None else self.used]
        if sum(edges.shape[1] for edges in used) != len(weights):
            raise ValueError(
                f"{self.name}: {type(self.module).__name__} takes the softmax of {len(weights)} "
                f"of its {sum(edges.shape[1] for edges in used)} edges, expected all at once "
                "(RGATConv: attention_mechanism='across-relation')"
            )
        rows = weights.reshape(len(weights), -1).split([edges.shape[1] for edges in used])
        calls, again = [], []
        for kind, edges, part in zip(kinds, used, rows, strict=True):
            edge_index, places = callers_places(edges, given[kind])
            if places is None:
                alpha = part.view_as(part)
                again.append(alpha)
            else:
                empty = part.new_zeros(edge_index.shape[1], part.shape[1])
                alpha = empty.index_copy(0, places, part)
                again.append(alpha[places])
            call = EdgeCall(
                layer=self.name,
                tap="pyg",
                edge_index=edge_index,
                is_added_loop=torch.arange(edge_index.shape[1], device=edges.device)
                >= given[kind].shape[1],
                num_nodes=self._num_nodes(kind, edge_index),
                weights=alpha.detach(),
                seen_in=alpha,
                edge_type=kind,
            )
            calls.append(call)
        result = again[0] if len(again) == 1 else torch.cat(again)
        return calls, result.view(weights.shape)

    def _source_target(self, edges: Any) -> Tensor:
        """Return edges in any form of PyG's as [2, edges], with messages from row 0 to row 1."""
        if hasattr(edges, "coo"):  # torch_sparse.SparseTensor, which holds the transpose
            row, column, _ = edges.coo()
            return torch.stack([column, row])
        if edges.layout is not torch.strided:
            edges = edges.detach().to_sparse_coo().coalesce().indices().flip(0)
        elif hasattr(edges, "as_tensor"):
            edges = edges.as_tensor()
        return edges.flip(0) if getattr(self.module, "flow", "") == "target_to_source" else edges

    def _num_nodes(self, kind: Any, edge_index: Tensor) -> tuple[int, int]:
        """Return the numbers of sources and targets."""
        nodes = self.nodes
        if isinstance(nodes, dict):
            nodes = (nodes[kind[0]], nodes[kind[2]])
        if isinstance(nodes, Tensor):
            nodes = (nodes, nodes)
        known = [n.shape[0] for n in nodes or () if isinstance(n, Tensor)]
        if len(known) == 2:
            return known[0], known[1]
        reached = [int(row.max()) + 1 if row.numel() else 0 for row in edge_index]
        return (known or reached)[0], reached[1]


_runs: ContextVar[tuple[_Run, ...]] = ContextVar("runs of convolutions", default=())


def callers_places(used: Tensor, given: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the caller's edges followed by the self-loops that a layer added, and the index there
    of each of the layer's edges; None if the layer uses the caller's edges.

    A layer that adds self-loops replaces the caller's, which then have no edge of the layer.
    Repeated edges are matched in their order.

    Args:
        used: [2, edges of the layer].
        given: [2, edges of the caller].

    Raises:
        ValueError: other edges than self-loops were added or left out.
    """
    if torch.equal(used, given):
        return given, None
    is_loop = used[0] == used[1]
    proper = (given[0] != given[1]).nonzero().squeeze(1)
    kept = (~is_loop).nonzero().squeeze(1)
    size = 1 + max(int(edges.max()) if edges.numel() else 0 for edges in (used, given))
    sides = [(used, kept), (given, proper)]
    codes = [edges[0, rows].long() * size + edges[1, rows] for edges, rows in sides]
    sorted_codes, orders = zip(*(code.sort(stable=True) for code in codes), strict=True)
    if not torch.equal(*sorted_codes):
        raise ValueError(
            f"edge_index: the layer goes along {used.shape[1]} edges that are not the "
            f"{given.shape[1]} it was given with self-loops added or removed"
        )
    places = torch.empty_like(used[0], dtype=torch.int64)
    places[kept[orders[0]]] = proper[orders[1]]
    places[is_loop] = torch.arange(int(is_loop.sum()), device=used.device) + given.shape[1]
    return torch.cat([given, used[:, is_loop]], dim=1), places


def _homes(module: nn.Module) -> list[str]:
    """Return the Python modules of a convolution's class and base classes that import softmax."""
    theirs = sys.modules["torch_geometric.utils"].softmax
    homes = dict.fromkeys(kind.__module__ for kind in type(module).__mro__)
    found = {home: getattr(sys.modules.get(home), "softmax", None) for home in homes}
    return [home for home, function in found.items() if function and unwrap(function) is theirs]
