"""One attention that ran: what went in, what came out, and its weights in blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs
from attnkit.core.masks.edges import Edges
from attnkit.core.precision import no_autocast, wide
from attnkit.core.weights import Indices, as_indices, of_heads, row_blocks, weights_of_rows

PROPAGATED_ELEMENTS = 2**21  # scores at once, of which a step holds several copies


@dataclass(eq=False)
class AttentionCall:
    """One attention of dense tokens that ran.

    layer: the module in whose forward it ran, named as in `named_modules()`; "" is the model.
    tap: how it was seen: "attend", "scaled_dot_product_attention", "multi_head_attention_forward"
        or "transformers".
    inputs: what the kernel was given; under autocast in autocast's dtype.
    output: in autograd's graph if there is one, so that it has a gradient.
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
        """A: how much each query looks at each key, before dropout.

        Computed from queries and keys in blocks of rows, in float32 (float64 if the inputs are),
        without gradients; only the rows and heads asked for. A row that may look nowhere is 0.

        Raises:
            IndexError: no such row or head.
        """
        rows, heads = self._chosen(rows, heads)
        return self._joined([weights for _, weights, _ in self._blocks(rows, heads)], rows, heads)

    def weight_gradient(
        self,
        output_gradient: Annotated[Tensor, "batch heads queries value_dim"],
        rows: Indices = None,
        heads: Indices = None,
    ) -> Annotated[Tensor, "batch chosen_heads rows keys"]:
        """∂y/∂A = (∂y/∂O) Vᵀ, since O = A V: from the gradient that any kernel's backward gives.

        Args:
            output_gradient: ∂y/∂O, `torch.autograd.grad(y, call.output)`.

        Raises:
            ValueError: a gradient of another shape, or an output that is not a product of A and V
                (computed with dropout, or with keys drawn at random).
        """
        self._check_gradient(output_gradient)
        rows, heads = self._chosen(rows, heads)
        blocks = self._blocks(rows, heads, output_gradient, needs_weights=False)
        return self._joined([gradient for _, _, gradient in blocks], rows, heads)

    def propagate(
        self,
        r: Annotated[Tensor, "batch queries"],
        *,
        output_gradient: Annotated[Tensor, "batch heads queries value_dim"] | None = None,
    ) -> Annotated[Tensor, "batch keys"]:
        """r Ā: a row vector times the mean over heads of A, or with a gradient of (∂y/∂A ⊙ A)⁺.

        In blocks of rows, so that no more than one block of A is held; rows where r is 0 are not
        computed.

        Args:
            r: a weight for each query.
            output_gradient: as in `weight_gradient`.

        Raises:
            ValueError: a shape that does not fit; as `weight_gradient`.
        """
        expected = [self.query.shape[0], self.num_queries]
        if list(r.shape) != expected:
            raise ValueError(
                f"r: expected [batch, queries] = {expected} for the layer {self.layer!r}, "
                f"got {list(r.shape)}"
            )
        if output_gradient is not None:
            self._check_gradient(output_gradient)
        dtype = wide(self.query.dtype)
        r = r.detach().to(dtype)
        _, heads = self._chosen(None, None)
        total = r.new_zeros(r.shape[0], self.num_keys)
        rows = (r != 0).any(dim=0).nonzero()[:, 0]
        for block, weights, gradient in self._blocks(
            rows, heads, output_gradient, block_elements=PROPAGATED_ELEMENTS
        ):
            if output_gradient is not None:
                weights = weights.mul_(gradient).relu_()
            total += (r[:, None, None, block] @ weights).sum(dim=(1, 2))
        return total / len(heads)

    def _blocks(
        self,
        rows: Tensor,
        heads: Tensor,
        output_gradient: Tensor | None = None,
        *,
        needs_weights: bool = True,
        block_elements: int | None = None,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Some rows, their weights and the gradient of these, an empty tensor where not asked."""
        nothing = self.query.new_empty(0)
        with torch.no_grad(), no_autocast(self.query):
            exact = of_heads(self.inputs, heads)
            if output_gradient is not None:
                output_gradient = output_gradient[:, heads].to(exact.value.dtype)
        for block in row_blocks(exact, rows, block_elements):
            with torch.no_grad(), no_autocast(self.query):
                weights = weights_of_rows(exact, block, heads) if needs_weights else nothing
                gradient = (
                    nothing
                    if output_gradient is None
                    else output_gradient[:, :, block] @ exact.value.transpose(2, 3)
                )
            yield block, weights, gradient

    def _joined(self, blocks: list[Tensor], rows: Tensor, heads: Tensor) -> Tensor:
        if blocks:
            return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)
        size = self.query.shape[0], len(heads), len(rows), self.num_keys
        return self.query.new_empty(size, dtype=wide(self.query.dtype))

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
