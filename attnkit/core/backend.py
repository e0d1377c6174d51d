"""What a kernel is: it declares its limits, says where it pays, and computes."""

from __future__ import annotations

from torch import Tensor

from attnkit.core.inputs import Inputs

__all__ = ["Backend"]


class Backend:
    """One kernel: `unsupported_reasons(inputs)` declares its limits, calling it computes."""

    name: str

    def unsupported_reasons(self, inputs: Inputs) -> list[str]:
        """Every reason why this kernel cannot serve the inputs; empty if it can."""
        raise NotImplementedError

    def pays(self, inputs: Inputs) -> bool:
        """Whether "auto" should take this kernel where it can serve."""
        return True

    def __call__(self, inputs: Inputs) -> Tensor:
        """The attention's output, [batch, heads, queries, value_dim]."""
        raise NotImplementedError
