"""The record of one attention that ran, over dense tokens or over the edges of a graph: its inputs,
output and weights."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.edges.edges import edge_weights
from attnkit.core.masks.edges import EdgeFeatures, Edges, in_callers_order
from attnkit.core.operators.precision import no_autocast, wide
from attnkit.core.weights import Indices, as_indices, of_heads, row_blocks, weights_of_rows

PROPAGATED_ELEMENTS = 2**21  # scores of a block; a step holds several copies of them


@dataclass(eq=False)
class AttentionCall:
    """The record of one attention over dense tokens.

    layer: the module in whose forward it ran, named as in `named_modules()`; "" is the model.
    tap: the observed function: "attend", "scaled_dot_product_attention",
        "multi_head_attention_forward" or "transformers".
    inputs: the inputs of the kernel; under autocast in autocast's dtype.
    output: the output, which is part of autograd's graph if there is one and so has a gradient.
    """

    layer: str
    tap: str
    inputs: Inputs
    output: Annotated[Tensor, "batch heads queries value_dim"]

    @property
    def query(self) -> Annotated[Tensor, "batch heads queries head_dim"]:
        return self.inputs.query

    @property
    def key(self) -> Annotated[Tensor, "batch kv_heads keys head_dim"]:
        return self.inputs.key

    @property
    def value(self) -> Annotated[Tensor, "batch kv_heads keys value_dim"]:
        return self.inputs.value

    @property
    def num_queries(self) -> int:
        return self.inputs.num_queries

    @property
    def num_keys(self) -> int:
        return self.inputs.num_keys

    @property
    def num_heads(self) -> int:
        return self.inputs.query.shape[1]

    @property
    def is_self(self) -> bool:
        """Whether there are as many queries as keys, as in self-attention."""
        return self.num_queries == self.num_keys

    def weights(
        self, rows: Indices = None, heads: Indices = None
    ) -> Annotated[Tensor, "batch chosen_heads rows keys"]:
        """Compute the weights A before dropout, for the given rows and heads only.

        They are computed from queries and keys in blocks of rows, in float32 (float64 if the inputs
        are), without gradients. A row that may look nowhere is 0.

        Raises:
            IndexError: no such row or head.
        """
        rows, heads = self._chosen(rows, heads)
        with torch.no_grad(), no_autocast(self.query):
            exact = of_heads(self.inputs, heads)
            blocks = [weights_of_rows(exact, block, heads) for block in row_blocks(exact, rows)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)

    def weight_gradient(
        self,
        output_gradient: Annotated[Tensor, "batch heads queries value_dim"],
        rows: Indices = None,
        heads: Indices = None,
    ) -> Annotated[Tensor, "batch chosen_heads rows keys"]:
        """Compute ∂y/∂A = (∂y/∂O) Vᵀ, since O = A V, from the gradient that any kernel gives.

        Args:
            output_gradient: ∂y/∂O, `torch.autograd.grad(y, call.output)`.

        Raises:
            ValueError: the gradient has another shape, or the output is not the product of A and V
                (it was computed with dropout, or with keys drawn at random).
        """
        self._check_gradient(output_gradient)
        rows, heads = self._chosen(rows, heads)
        with torch.no_grad(), no_autocast(self.query):
            value = of_heads(self.inputs, heads).value
            return output_gradient[:, heads][:, :, rows].to(value.dtype) @ value.transpose(2, 3)

    def propagate(
        self,
        r: Annotated[Tensor, "batch queries"],
        *,
        output_gradient: Annotated[Tensor, "batch heads queries value_dim"] | None = None,
    ) -> Annotated[Tensor, "batch keys"]:
        """Compute r Ā, a row vector times the mean over heads of A, or of (∂y/∂A ⊙ A)⁺ if a
        gradient is given.

        It is computed in blocks of rows, so that only one block of A is held; rows where r is 0 are
        skipped.

        Args:
            r: a weight for each query.
            output_gradient: as in `weight_gradient`.

        Raises:
            ValueError: a shape does not fit, or as `weight_gradient`.
        """
        expected = [self.query.shape[0], self.num_queries]
        if list(r.shape) != expected:
            raise ValueError(
                f"r: expected [batch, queries] = {expected} for the layer {self.layer!r}, "
                f"got {list(r.shape)}"
            )
        if output_gradient is not None:
            self._check_gradient(output_gradient)
        r = r.detach().to(wide(self.query.dtype))
        _, heads = self._chosen(None, None)
        total = r.new_zeros(r.shape[0], self.num_keys)
        rows = (r != 0).any(dim=0).nonzero()[:, 0]
        with torch.no_grad(), no_autocast(self.query):
            exact = of_heads(self.inputs, heads)
            for block in row_blocks(exact, rows, PROPAGATED_ELEMENTS):
                weights = weights_of_rows(exact, block, heads)
                if output_gradient is not None:
                    received = output_gradient[:, :, block].to(exact.value.dtype)
                    weights.mul_(received @ exact.value.transpose(2, 3)).relu_()
                total += (r[:, None, None, block] @ weights).sum(dim=(1, 2))
        return total / len(heads)

    def _chosen(self, rows: Indices, heads: Indices) -> tuple[Tensor, Tensor]:
        mask, device = self.inputs.mask, self.query.device
        if isinstance(mask, Edges) and mask.has_repeated:
            raise ValueError(
                f"the layer {self.layer!r}: expected no duplicate edges; "
                "attnkit.edge_weights gives a weight for each"
            )
        if self.inputs.edge_features is not None:
            raise ValueError(
                f"the layer {self.layer!r}: expected edges that carry nothing in a batch; "
                "attnkit.edge_weights gives the weights of edges with features or a bias"
            )
        try:
            return (
                as_indices("rows", rows, self.num_queries, device),
                as_indices("heads", heads, self.num_heads, device),
            )
        except IndexError as error:
            raise IndexError(f"{self.layer}: {error}") from None

    def _check_gradient(self, output_gradient: Tensor) -> None:
        if output_gradient.shape != self.output.shape:
            raise ValueError(
                "output_gradient: expected the shape of the output of the layer "
                f"{self.layer!r}, {list(self.output.shape)}, got {list(output_gradient.shape)}"
            )
        if self.inputs.dropout_p or self.inputs.normalizer.draws:
            why = "dropout" if self.inputs.dropout_p else "keys drawn at random"
            raise ValueError(
                f"the layer {self.layer!r} ran with {why}, so that its output is not A V: "
                "model.eval() first"
            )


@dataclass(eq=False)
class EdgeCall:
    """The record of one attention over the edges of a graph.

    A layer that adds self-loops replaces those of the caller: their rows of weights are 0.

    layer, tap: as in `AttentionCall`; taps are "attend" and "pyg".
    edge_index: the edges in the caller's order, sources in row 0 and targets in row 1; self-loops
        that the layer added come last.
    is_added_loop: which edges are self-loops that the layer added.
    num_nodes: the numbers of sources and of targets.
    weights: the weights before dropout, without gradients.
    seen_in: the tensor by which autograd can differentiate: the weights for torch_geometric's
        convolutions, the output [1, heads, targets, value_dim] for `attend`.
    value: the values that are averaged; None if `seen_in` is the weights.
    edge_features: the features that edges add to the values, in the order of `edge_index`.
    edge_type: the edge type; a heterogeneous convolution has one call for each of its types.
    """

    layer: str
    tap: str
    edge_index: Annotated[Tensor, "2 edges", int]
    is_added_loop: Annotated[Tensor, "edges", bool]
    num_nodes: tuple[int, int]
    weights: Annotated[Tensor, "edges heads"]
    seen_in: Tensor
    value: Annotated[Tensor, "heads sources value_dim"] | None = None
    edge_features: EdgeFeatures | None = None
    edge_type: tuple[str, str, str] | None = None

    @property
    def num_heads(self) -> int:
        return self.weights.shape[1]

    @property
    def is_replaced(self) -> Annotated[Tensor, "edges", bool]:
        """The caller's self-loops that the layer replaced with its own."""
        is_loop = self.edge_index[0] == self.edge_index[1]
        return is_loop & ~self.is_added_loop & self.is_added_loop.any()

    def weight_gradient(self, gradient: Tensor) -> Annotated[Tensor, "edges heads"]:
        """Compute ∂y/∂α of each edge and head; 0 for a self-loop that the layer replaced.

            ∂y/∂α_e = ∂y/∂output_i · (value_j + W_v e_ij)    for the edge e from j to i

        Args:
            gradient: `torch.autograd.grad(y, call.seen_in)`.

        Raises:
            ValueError: the gradient has another shape.
        """
        if gradient.shape != self.seen_in.shape:
            raise ValueError(
                f"gradient: expected that of `seen_in` of the layer {self.layer!r}, "
                f"{list(self.seen_in.shape)}, got {list(gradient.shape)}"
            )
        if self.value is None:
            return gradient
        source, target = self.edge_index
        by_target, value = gradient[0], self.value.detach()
        result = torch.empty_like(self.weights)
        features = self.edge_features
        for head in range(self.num_heads):
            received = by_target[head]
            result[:, head] = (received[target] * value[head][source]).sum(dim=1)
            if features is not None and features.value_weight is not None:
                assert features.features is not None
                along = received @ features.value_weight[head]
                result[:, head] += (along[target] * features.features).sum(dim=1)
        return result.masked_fill(self.is_replaced[:, None], 0.0).detach()


Call = AttentionCall | EdgeCall


def is_of_edges(inputs: Inputs, *, is_batched: bool) -> bool:
    """Return whether the attention goes over a graph's edges, so that an `EdgeCall` records it."""
    is_softmax = type(inputs.normalizer).__name__ == "Softmax"
    return isinstance(inputs.mask, Edges) and is_softmax and inputs.bias is None and not is_batched


def edge_call(layer: str, inputs: Inputs, output: Tensor) -> EdgeCall:
    """Return the record of `attend(…, mask=edges)` with tensors that lack the batch."""
    edges, features = inputs.mask, inputs.edge_features
    assert isinstance(edges, Edges)
    with torch.no_grad():
        weights = edge_weights(
            inputs.query[0],
            inputs.key[0],
            edges,
            score=inputs.score,
            edge_features=features,
            sink=inputs.sink,
        ).T
        value = inputs.repeated_heads()[1][0]
    edge_index = edges.edge_index if edges.looped_from is None else edges.looped_from
    num_edges = edge_index.shape[1]
    if edges.looped_from is not None:
        weights = in_callers_order(weights, edges)
        if features is not None:
            rows = features.features
            rows = None if rows is None else in_callers_order(rows, edges)
            features = EdgeFeatures(rows, features.key_weight, features.value_weight)
        added = edges.edge_index[:, edges.num_edges - min(edges.sizes) :]
        edge_index = torch.cat([edge_index, added], dim=1)
    places = torch.arange(edge_index.shape[1], device=edge_index.device)
    targets, sources = edges.sizes
    return EdgeCall(
        layer=layer,
        tap="attend",
        edge_index=edge_index,
        is_added_loop=places >= num_edges,
        num_nodes=(sources, targets),
        weights=weights,
        seen_in=output,
        value=value,
        edge_features=features,
    )
