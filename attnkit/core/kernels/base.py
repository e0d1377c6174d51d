"""What a kernel is: it declares its limits, says where it pays, and computes."""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs, Normalizer
from attnkit.core.masks.edges import Edges
from attnkit.core.normalizers.kinds import Softmax
from attnkit.core.scores.kinds import ScaledDot


class Backend:
    """One kernel: `unsupported_reasons(inputs)` tells its limits, calling it computes.

    Subclasses declare their limits in `reasons`.
    """

    name: str
    normalizers: tuple[type[Normalizer], ...] = (Softmax,)
    """What it normalises by."""
    reads_edges = False
    """Whether it reads edges one by one, with what they carry, or as a boolean mask."""

    def unsupported_reasons(self, inputs: Inputs) -> list[str]:
        """Every reason why this kernel cannot serve the inputs; empty if it can."""
        if not isinstance(inputs.normalizer, self.normalizers):
            names = " and ".join(normalizer.__name__ for normalizer in self.normalizers)
            return [f"normalises by {names}, not by {inputs.normalizer}"]
        reasons = self.reasons(inputs)
        if isinstance(inputs.mask, Edges) and not self.reads_edges:
            if inputs.edge_features is not None:
                reasons.append("reads no edge features")
            elif not reasons and (torch.compiler.is_exporting() or inputs.mask.has_repeated):
                reasons.append("reads a boolean mask, which cannot say that an edge is given twice")
        return reasons

    def reasons(self, inputs: Inputs) -> list[str]:
        """`unsupported_reasons` beside a normaliser that the kernel does not have."""
        raise NotImplementedError

    def pays(self, inputs: Inputs) -> bool:
        """Whether "auto" should take this kernel where it can serve."""
        return True

    def __call__(self, inputs: Inputs) -> Tensor:
        """The attention's output, [batch, heads, queries, value_dim]."""
        raise NotImplementedError


def dot_product_reasons(inputs: Inputs, *, needs_positive_scale: bool = True) -> list[str]:
    """Why a kernel of scaled dot products, and of nothing else, cannot compute the score.

    Fused kernels write −inf before they scale, and keep a running maximum of unscaled scores: they
    need a positive scale.
    """
    score = inputs.score
    if inputs.dot_dim is None:
        return [f"computes scaled dot products, and the score {score} is none"]
    reasons = []
    if score.softcap is not None:
        reasons.append(f"computes no softcap, got {score.softcap}")
    if needs_positive_scale and isinstance(score, ScaledDot) and inputs.scale <= 0:
        reasons.append(f"scale is positive in this kernel, got {inputs.scale}")
    return reasons


def empty_reasons(inputs: Inputs) -> list[str]:
    """Why a kernel that needs something to compute refuses empty inputs."""
    if not inputs.is_empty:
        return []
    return [
        f"a size is zero: query {list(inputs.query.shape)}, "
        f"key {list(inputs.key.shape)}, value {list(inputs.value.shape)}"
    ]


def refuse_second_derivative(backend: str, *tensors: Tensor | None) -> None:
    """RuntimeError where autograd would have to differentiate a backward of ours, which it
    cannot follow, and would silently leave that part out."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"the backend {backend!r} has no second derivative (create_graph=True); "
            "backend='reference' has"
        )
