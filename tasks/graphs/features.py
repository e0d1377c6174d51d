"""Features of nodes in the form that models read: sparse, normalised, with positional encodings."""

import warnings
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import AddLaplacianEigenvectorPE, AddRandomWalkPE
from torch_geometric.utils import to_undirected

from attnkit.core.operators.sparse import with_values
from attnkit.lightning.errors import UserError

Positions = Literal["laplacian", "random_walk"]


def to_sparse_csr(x: Tensor) -> Tensor:
    """Return `x.to_sparse_csr()`, without torch's warning that this layout is in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support", UserWarning)
        return x.to_sparse_csr()


def normalized(x: Tensor) -> Tensor:
    """Return rows divided by the sums of their absolute values, dense or sparse CSR."""
    if x.layout == torch.strided:
        sums = x.abs().sum(dim=1, keepdim=True)
        return x / sums.masked_fill(sums == 0, 1)
    rows = torch.repeat_interleave(x.crow_indices().diff())
    values = x.values()
    sums = values.new_zeros(len(x)).index_add_(0, rows, values.abs())
    shares = values / sums.masked_fill(sums == 0, 1)[rows]
    return with_values(x, shares)


def node_positions(data: Data, kind: Positions, dim: int, seed: int = 0) -> Tensor:
    """Return positional encodings of a graph's nodes, float32 [nodes, dim].

    - "laplacian": eigenvectors of the dim smallest non-trivial eigenvalues of the symmetric
      Laplacian of the graph without directions, with signs drawn by `seed` (Dwivedi et al.,
      Benchmarking Graph Neural Networks, 2020; PyG's `AddLaplacianEigenvectorPE`)
    - "random_walk": the probabilities that a random walk is back at its node after 1, 2, … dim
      steps (Dwivedi et al., 2022; PyG's `AddRandomWalkPE`). It computes powers of the adjacency
      matrix, which are dense for a large graph without locality.

    Raises:
        UserError: `dim` is above the number of nodes less 2, or the eigenvectors were not found.
    """
    bare = Data(edge_index=data.edge_index, num_nodes=data.num_nodes)
    if kind == "random_walk":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse", UserWarning)  # CSR is in beta state
            return AddRandomWalkPE(dim, "positions")(bare).positions.float()
    if dim > data.num_nodes - 2:
        raise UserError(
            f"data.position_dim: expected at most {data.num_nodes - 2}, the number of nodes less "
            f"2, got {dim}"
        )
    bare.edge_index = to_undirected(bare.edge_index, num_nodes=bare.num_nodes)
    options: dict[str, Any] = {}
    if data.num_nodes >= AddLaplacianEigenvectorPE.SPARSE_THRESHOLD:
        options["v0"] = np.random.default_rng(seed).standard_normal(data.num_nodes)
    transform = AddLaplacianEigenvectorPE(dim, "positions", is_undirected=True, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return transform(bare).positions.float()
        except RuntimeError as error:  # ArpackNoConvergence
            raise UserError(
                f"data.positions: the eigenvectors were not found ({error}); use "
                "data.positions=random_walk"
            ) from error
