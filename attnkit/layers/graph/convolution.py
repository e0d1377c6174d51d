"""Graph convolution as attention whose scores are all equal."""

from typing import Annotated

import torch
from torch import Tensor, nn

from attnkit.core.attend import attend
from attnkit.core.masks.edges import Edges
from attnkit.core.multihead import reset_linear


class GraphConvolution(nn.Module):
    """The graph convolution of Kipf and Welling (2017), computed by the edge attention kernels.

        output_i = Σ_e W x_j / √(d_i d_j) + b = √d_i · mean_e(W x_j / √d_j) + b

    over the edges e from j to i and one self-loop, which replaces the graph's own; d_i is their
    number. A mean over the neighbours is attention with equal scores. Equal to PyG's
    `GCNConv` with its defaults, without its memory of edges × channels.

    Nodes [nodes, in_channels] in, dense, and [nodes, out_channels] out.
    """

    def __init__(self, in_channels: int, out_channels: int, backend: str = "auto") -> None:
        super().__init__()
        self.proj = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.backend = backend
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the matrix Xavier-uniform and the bias to 0."""
        reset_linear(self.proj)
        nn.init.zeros_(self.bias)

    def forward(
        self, x: Annotated[Tensor, "nodes in_channels"], edges: Edges
    ) -> Annotated[Tensor, "nodes out_channels"]:
        looped = edges.with_loops
        target = looped.edge_index[1]
        ones = x.new_ones(target.shape[0])  # bincount cannot be exported
        root = x.new_zeros(x.shape[0]).index_add(0, target, ones).sqrt()[:, None]
        value = self.proj(x) / root
        equal = value.new_zeros(1, x.shape[0], 1)
        mean = attend(equal, equal, value[None], mask=looped, backend=self.backend)
        return mean[0] * root + self.bias
