"""Nadaraya–Watson kernel regression, which is attention with the Gaussian score."""

from math import log
from typing import Annotated

import torch
from torch import Tensor, nn

from attnkit.core.arguments import positive
from attnkit.core.attend import attend
from attnkit.core.kernels.choose import named_backend
from attnkit.core.masks.base import Mask
from attnkit.core.scores.kinds import Gaussian


class NadarayaWatson(nn.Module):
    """Kernel regression (Nadaraya, On Estimating Regression, 1964; Watson 1964).

        estimate(x) = Σ_j K(x − x_j) y_j / Σ_j K(x − x_j),   K(u) = exp(−‖u‖² / (2 bandwidth²))

    Nothing is fitted: the samples are arguments. The bandwidth may be learned, for example with a
    mask that hides each sample from itself (leave-one-out). Far from all samples, where the formula
    is 0/0 in floating point, the estimate is the value of the nearest sample.

    Args:
        bandwidth: the kernel's standard deviation, in units of x.
        learnable: whether the bandwidth, exp(`log_bandwidth`), is trained.
        backend: the attention kernel, as in `attend`.

    Raises:
        ValueError: the bandwidth is not positive.
    """

    def __init__(
        self, bandwidth: float = 1.0, *, learnable: bool = True, backend: str = "auto"
    ) -> None:
        super().__init__()
        positive(bandwidth=bandwidth)
        named_backend(backend)
        self.initial_bandwidth = bandwidth
        self.log_bandwidth = nn.Parameter(torch.empty(()), requires_grad=learnable)
        self.backend = backend
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the bandwidth to its initial value."""
        nn.init.constant_(self.log_bandwidth, log(self.initial_bandwidth))

    @property
    def bandwidth(self) -> Annotated[Tensor, ""]:
        """The kernel's standard deviation, in units of x."""
        return self.log_bandwidth.exp()

    def forward(
        self,
        query: Annotated[Tensor, "*batch queries dim"],
        key: Annotated[Tensor, "*batch keys dim"],
        value: Annotated[Tensor, "*batch keys value_dim"],
        *,
        mask: Mask | Annotated[Tensor, "#batch #heads #queries #keys", bool] | None = None,
    ) -> Annotated[Tensor, "*batch queries value_dim"]:
        """Return the estimates at `query` from samples `value` at `key`.

        Args:
            query, key, value: tensors that all have or all omit the batch dimension.
            mask: which samples an estimate may use, as in `attend`, for one head; an estimate
                without samples is 0.
        """
        if query.ndim not in (2, 3):
            raise ValueError(
                f"query: expected [queries, dim] or [batch, queries, dim], got {list(query.shape)}"
            )
        is_batched = query.ndim == 3
        heads = [
            (tensor if is_batched else tensor[None])[:, None] for tensor in (query, key, value)
        ]
        output = attend(*heads, score=Gaussian(self.bandwidth), mask=mask, backend=self.backend)
        return output[:, 0] if is_batched else output[0, 0]
