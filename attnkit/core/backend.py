"""What a kernel is: it declares its limits, says where it pays, and computes."""

from __future__ import annotations

from torch import Tensor

from attnkit.core.inputs import Inputs
from attnkit.core.normalizers import Normalizer, Softmax

__all__ = ["Backend"]


class Backend:
    """One kernel: `unsupported_reasons(inputs)` tells its limits, calling it computes.

    Subclasses declare their limits in `reasons`.
    """

    name: str
    normalizers: tuple[type[Normalizer], ...] = (Softmax,)
    """What it normalises by."""

    def unsupported_reasons(self, inputs: Inputs) -> list[str]:
        """Every reason why this kernel cannot serve the inputs; empty if it can."""
        if not isinstance(inputs.normalizer, self.normalizers):
            names = " and ".join(normalizer.__name__ for normalizer in self.normalizers)
            return [f"normalises by {names}, not by {inputs.normalizer}"]
        return self.reasons(inputs)

    def reasons(self, inputs: Inputs) -> list[str]:
        """`unsupported_reasons` beside a normaliser that the kernel does not have."""
        raise NotImplementedError

    def pays(self, inputs: Inputs) -> bool:
        """Whether "auto" should take this kernel where it can serve."""
        return True

    def __call__(self, inputs: Inputs) -> Tensor:
        """The attention's output, [batch, heads, queries, value_dim]."""
        raise NotImplementedError
