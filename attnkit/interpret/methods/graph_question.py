"""The question to a graph model: its inputs, a node or a pair of nodes, and a class."""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from inspect import Parameter, signature
from itertools import count
from operator import index as as_integer
from typing import Any

import torch
from torch import Tensor, nn

from attnkit.core.arguments import in_a_line
from attnkit.core.capture.calls import EdgeCall
from attnkit.core.capture.watch import watch_attention
from attnkit.core.masks.edges import Edges
from attnkit.core.multihead import MultiHeadAttention
from attnkit.interpret.methods.question import Layers, Target, logits_of
from attnkit.interpret.quantity import Of
from attnkit.layers.graph.attention import GraphAttention

Index = int | Sequence[int] | None
"""A node; a pair of nodes, for a model that takes pairs; or None for the whole graph."""
UNCHANGED = 1e-4
"""Answers that differ by at most this count as equal, since rounding differs."""


class GraphQuestion(Target):
    """y is the logit of a class for one node, for a pair of nodes, or for the graph.

    Attributes:
        edge_index: the caller's edges [2, edges].
        index: the node; a pair of nodes, passed to the model as `pairs` [2, 1], for which it
            returns one row; None: the graph, for which the model returns one row.
        nodes: the nodes of the index.
        target, logits: the class and the logits, with a first dimension of 1.
        num_hops: number of steps in which information reaches the node or the pair; None: not
            limited, since nodes also see each other without edges, and all edges count.
        candidates: which edges can change y, [edges] bool, known after `prepare`.
    """

    unit = "edge"

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        index: Index = None,
        target: int | None = None,
        num_hops: int | None = None,
        layers: Layers = None,
        of: Of = "probability",
    ) -> None:
        super().__init__(model, layers, of)
        self.index, target = _index(index), _number("target", target)
        self.target = None if target is None else torch.tensor([target])
        self.num_hops = _number("num_hops", num_hops, least=1)
        self._num_nodes = 0
        self._names: dict[int | str, str] = {}
        self.given = self._given(inputs)
        self.place = self._place_of_edges()
        edges = self.given[self.place]
        self.edge_index: Tensor = edges.edge_index if isinstance(edges, Edges) else edges
        if hasattr(self.edge_index, "as_tensor"):
            self.edge_index = self.edge_index.as_tensor()
        if not self.num_edges:
            raise ValueError("inputs: a graph without edges")
        self.candidates = torch.ones_like(self.edge_index[0], dtype=torch.bool)
        if isinstance(self.index, tuple):
            self._check_pair(self.index)

    @property
    def nodes(self) -> list[int]:
        """The explained nodes; an empty list stands for the graph."""
        return nodes_of(self.index)

    @property
    def row(self) -> int:
        """The row of the model's output that holds the answer."""
        return self.index if isinstance(self.index, int) else 0

    def prepare(self) -> None:
        """Run the model, and find which edges can change its answer.

        The number of steps is the number of layers along edges, checked on the model: if y has a
        gradient at a node farther away, it is raised to reach that node, and it is raised further
        while y changes when all other edges are removed, for example through a node's degree.
        """
        is_counted = self.num_hops is None
        with torch.set_grad_enabled(is_counted):
            logits = self.ask()
        if self.index is None:
            return
        between = torch.isin(self.edge_index, self.edge_index.new_tensor(self.nodes))
        if bool((between.all(dim=0) & (self.edge_index[0] != self.edge_index[1])).any()):
            self.notes.append("An edge joins the pair in the graph, and carries messages.")
        if is_counted:
            self.num_hops = self._hops_of(logits)
        if self.num_hops is not None:
            self.candidates = self._within(self.num_hops)
            self.notes.append(
                f"{int(self.candidates.sum())} of {self.num_edges} edges reach the "
                f"{'node' if len(self.nodes) == 1 else 'pair'} in {self.num_hops} steps."
            )

    def run(self) -> object:
        """Return the model's output for the whole graph."""
        return self._call(self.given)

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1]

    def answers(self, keep: Tensor | None = None) -> Tensor:
        """Return the logits [nodes or 1, classes] with only the edges `keep` [edges]; None: all."""
        given = self.given if keep is None else self._kept(keep)
        return logits_of(self._call(given), type(self.model).__name__)

    def ask(self, keep: Tensor | None = None) -> Tensor:
        """Return the logits [classes] of the node or the graph, with only the edges `keep`."""
        if keep is not None and self.part is not None:
            return self.part.ask(keep[self.candidates])
        found = self.answers(keep)
        if self.index is None and len(found) != 1:
            raise ValueError(f"index: expected one of the {len(found)} nodes, got None")
        if self.row >= len(found):
            raise ValueError(f"index: the model answers for {len(found)} nodes, got {self.index}")
        logits = found[self.row]
        self._num_nodes = max(self._num_nodes, len(found))
        self.see(logits[None])
        return logits

    def y(self, keep: Tensor | None = None) -> Tensor:
        """Return the logit of the class, with only the edges `keep`."""
        logits = self.ask(keep)
        assert self.target is not None
        return logits[int(self.target)]

    def without(self, items: Tensor, removed: Tensor) -> Tensor:
        """Return the logits [_, classes] without the candidates in `removed` [_, candidates]."""
        keep, places = torch.ones_like(self.candidates), self.candidates.nonzero()[:, 0]
        logits = []
        for one in removed:
            keep[places] = ~one
            logits.append(self.ask(keep if one.any() else None))
        return torch.stack(logits)

    @torch.enable_grad()
    def _hops_of(self, logits: Tensor) -> int | None:
        """Return the number of steps in which edges change the answer; None: all edges count."""
        assert self.target is not None
        hops = count_hops(self.model)
        if hops is None:
            return None
        features = [
            one
            for one in self.given.values()
            if isinstance(one, Tensor) and one.requires_grad and len(one) == self._num_nodes
        ]
        if features and logits.requires_grad:
            y = logits[int(self.target)]
            found = torch.autograd.grad(y, features, allow_unused=True)
            parts = [part.flatten(1).any(dim=1) for part in found if part is not None]
            if parts:
                is_used = torch.stack(parts).any(dim=0)
                steps = steps_to(self.index, self.edge_index, len(is_used))[: len(is_used)][is_used]
                if bool((steps < 0).any()):
                    return None  # a node without a path to the explained one changes y
                hops = max([hops, *steps.tolist()])
        while not self._is_unchanged(self._within(hops)):
            wider = self._within(hops + 1)
            if torch.equal(wider, self._within(hops)):
                return None
            hops += 1
        return hops

    @torch.no_grad()
    def _is_unchanged(self, keep: Tensor) -> bool:
        """Return whether the answer is the same with only the edges `keep`."""
        if bool(keep.all()):
            return True
        assert self.logits is not None
        found = self.answers(keep)[self.row]
        return torch.allclose(found, self.logits[0], rtol=UNCHANGED, atol=UNCHANGED)

    def _within(self, num_hops: int) -> Tensor:
        """Return the edges that reach the node in at most `num_hops` steps, [edges] bool."""
        return self.reached(num_hops - 1)[self.edge_index[1]]

    @cached_property
    def part(self) -> "GraphQuestion | None":
        """The same question on the subgraph of the edges that can reach the node, after `prepare`.

        None if the subgraph is not much smaller, or if its answer differs, since the model looks at
        more of the graph, for example by a norm over all nodes.
        """
        if self.index is None:
            return None
        ends = self.edge_index[:, self.candidates].flatten()
        nodes, places = torch.cat([ends, ends.new_tensor(self.nodes)]).unique(return_inverse=True)
        edges, index = places[: len(ends)].view(2, -1), places[len(ends) :].tolist()
        if not edges.shape[1] or 2 * len(nodes) > self._num_nodes:
            return None

        def thin(place: int | str, given: Any) -> Any:
            """Return the subgraph's edges, and its rows of tensors with a row for each node."""
            if isinstance(given, Edges):
                return Edges(edges, len(nodes))
            if place == self.place:
                return edges
            if not isinstance(given, Tensor) or not given.ndim or len(given) != self._num_nodes:
                return given
            if given.layout == torch.strided:
                return given[nodes]
            return given.to_dense()[nodes].to_sparse(layout=given.layout)

        part = copy(self)
        part.given = {place: thin(place, one) for place, one in self._kept(self.candidates).items()}
        part.index = tuple(index) if isinstance(self.index, tuple) else index[0]
        part.edge_index, part._num_nodes, part.part = edges, 0, None
        assert self.logits is not None
        is_same = torch.allclose(part.ask(), self.logits[0], rtol=UNCHANGED, atol=UNCHANGED)
        return part if is_same else None

    def calls(self, layers: Layers = None, *, graph: bool = False) -> tuple[list[EdgeCall], Tensor]:
        """Return the attention calls of the layers, in their order, and the logit of the class.

        Args:
            layers: layers by position or name; None: all.
            graph: whether the results are in autograd's graph.

        Raises:
            ValueError: there is no attention along edges, or it goes along other edges.
        """
        with torch.set_grad_enabled(graph), watch_attention(self.model, layers) as heard:
            y = self.y()
        calls = [call for call in heard if isinstance(call, EdgeCall)]
        if not calls:
            raise ValueError(
                f"method: {type(self.model).__name__} has no attention along edges; expected "
                "'occlusion' or 'random'"
            )
        for call in calls:
            own = call.edge_index[:, : self.num_edges]
            if call.edge_type is not None or not torch.equal(own, self.edge_index):
                raise ValueError(
                    f"layers: {call.layer!r} goes along other edges than those of the inputs; "
                    "expected 'occlusion', or layers that do not"
                )
        return calls, y

    def reached(self, num_hops: int, num_nodes: int = 0) -> Tensor:
        """Return which nodes reach the explained one in at most `num_hops` steps, [nodes]."""
        steps = steps_to(self.index, self.edge_index, num_nodes)
        return (steps >= 0) & (steps <= num_hops)

    def _given(self, inputs: Any) -> dict[int | str, Any]:
        """Return the model's arguments by position, or by name if they are a dictionary.

        Raises:
            TypeError: other inputs, or texts.
        """
        if not isinstance(inputs, Mapping | Sequence):
            raise TypeError(
                "inputs: expected (x, edge_index, …) or a dictionary of arguments, got "
                f"{type(inputs).__name__}"
            )
        if isinstance(inputs, Mapping):
            given: dict[int | str, Any] = dict(inputs)
            self._names = {name: str(name) for name in given}
        else:
            given = dict(enumerate(inputs))
            parameters = signature(self.model.forward).parameters.values()
            named = [p.name for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
            self._names = dict(enumerate(named[: len(given)]))
        if "input_ids" in self._names.values():
            raise TypeError(
                "inputs: texts, as input_ids, are not explained; attnkit.diagnose_attention says "
                "what their attention does, attnkit.capture_attention gives its weights"
            )
        # inputs with gradients put all activations into the graph, even if parameters are frozen
        return {place: _with_gradient(one) for place, one in given.items()}

    def _place_of_edges(self) -> int | str:
        """Return the position or name of the edges among the arguments.

        Integers [2, n] whose name does not contain "edge" are not taken for edges.

        Raises:
            TypeError: no argument holds edges.
        """
        found = [
            place
            for place, one in self.given.items()
            if isinstance(one, Edges)
            or (_is_edges(one) and (isinstance(place, int) or "edge" in place))
        ]
        named = [place for place, name in self._names.items() if name == "edge_index"]
        if not found or not set(named) <= set(found):
            raise TypeError(
                "inputs: expected edges, integers [2, edges] or attnkit.Edges, named edge_index; a "
                "graph of several types of edges, or a sparse matrix, is not explained"
            )
        return [*named, *found][0]

    def _kept(self, keep: Tensor) -> dict[int | str, Any]:
        """Return the arguments with only the edges `keep`, and the rows of their features."""

        def kept(place: int | str, given: Any) -> Any:
            if isinstance(given, Edges):
                return Edges(given.edge_index[:, keep], *given.sizes)
            if place == self.place:
                return self.edge_index[:, keep]
            is_of_edges = self._names.get(place, "").startswith("edge") and isinstance(
                given, Tensor
            )
            if is_of_edges and given.ndim and len(given) == self.num_edges:
                return given[keep]
            return given

        return {place: kept(place, one) for place, one in self.given.items()}

    def _call(self, given: Mapping[int | str, Any]) -> object:
        """Return the model's output for arguments in the form of `self.given`."""
        by_name = {name: one for name, one in given.items() if isinstance(name, str)}
        values = () if by_name else given.values()
        if isinstance(self.index, tuple):
            by_name["pairs"] = self.edge_index.new_tensor(self.index, dtype=torch.int64)[:, None]
        return self.model(*values, **by_name)

    def _check_pair(self, pair: tuple[int, ...]) -> None:
        """Raise a TypeError if the model takes no pairs, a ValueError if nodes are out of range."""
        if "pairs" not in signature(self.model.forward).parameters:
            name = type(self.model).__name__
            raise TypeError(f"index: expected a node, since {name} takes no pairs, got {pair}")
        x = next(one for place, one in self.given.items() if place != self.place)
        self._num_nodes = len(x)
        if max(pair) >= len(x):
            raise ValueError(f"index: expected nodes from 0 to {len(x) - 1}, got {pair}")


def _number(name: str, given: Any, least: int = 0) -> int | None:
    """Return an integer, which may be given as a tensor or array without dimensions."""
    if given is None:
        return None
    try:
        number = as_integer(given)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {in_a_line(given)}") from None
    if number < least:
        raise ValueError(f"{name}: expected {least} or more, got {number}")
    return number


def _index(given: Any) -> Any:
    """Return a node, a pair of nodes or None; raise a TypeError or ValueError for anything else."""
    if not isinstance(given, list | tuple):
        return _number("index", given)
    if len(given) != 2 or None in given:
        raise ValueError(f"index: expected a node, or a pair of nodes such as (3, 7), got {given}")
    return tuple(_number("index", one) for one in given)


def nodes_of(index: Index) -> list[int]:
    """Return the nodes of an index; an empty list for the whole graph."""
    if index is None:
        return []
    return [index] if isinstance(index, int) else list(index)


def steps_to(index: Index, edge_index: Tensor, num_nodes: int = 0) -> Tensor:
    """Return the number of steps along edges from each node to the index, [nodes]; −1: no path.

    Args:
        index: the node, or a pair, of which the nearer node counts; None: the distance is 0 for
            all nodes.
        num_nodes: minimum length of the result, even if edges join fewer nodes.
    """
    source, target = edge_index
    size = max(int(edge_index.max()) + 1, num_nodes, *(node + 1 for node in nodes_of(index)), 0)
    steps = torch.full((size,), -1, device=edge_index.device)
    steps[nodes_of(index) or slice(None)] = 0
    for step in count(1):
        found = source[(steps[target] == step - 1) & (steps[source] < 0)]
        if not len(found):
            break
        steps[found] = step
    return steps


def count_hops(model: nn.Module) -> int | None:
    """Return the number of steps that messages take in a model, by counting its layers along edges.

    None if the model has none, or if nodes also see each other without edges.
    """
    from torch_geometric.nn import MessagePassing

    hops = 0
    for module in model.modules():
        if isinstance(module, MultiHeadAttention | nn.MultiheadAttention):
            return None
        if isinstance(module, GraphAttention | MessagePassing):
            steps = getattr(module, "K", 1)
            hops += steps if isinstance(steps, int) else 1
    return hops or None


def _is_edges(given: Any) -> bool:
    if isinstance(given, Edges):
        return True
    is_tensor = isinstance(given, Tensor) and given.layout is torch.strided and given.ndim == 2
    return is_tensor and len(given) == 2 and given.dtype in (torch.int32, torch.int64)


def _with_gradient(given: Any) -> Any:
    if isinstance(given, Tensor) and given.is_floating_point() and given.layout is torch.strided:
        with torch.inference_mode(False):
            return given.detach().clone().requires_grad_()
    return given
