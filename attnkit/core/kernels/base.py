"""The base class of kernels, and the reasons and helpers that several kernels share."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import has_static_value
from torch.nn import functional as F

from attnkit.core.contexts import Opened
from attnkit.core.inputs import Inputs
from attnkit.core.kernels.record import note_kernel
from attnkit.core.masks.base import Mask
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.kept import tensors_within
from attnkit.core.normalizers import Normalizer, Softmax
from attnkit.core.operators.cpu import has_tangent
from attnkit.core.operators.precision import EXACT
from attnkit.core.scores.additive import Additive
from attnkit.core.scores.kinds import ScaledDot

TRACED_PARTS = 16
"""About how many parts a kernel divides its work into under torch.compile, whose program contains
the operators of every part."""

NOT_EXACT = "gives bits that may depend on the batch or on threads, inside attnkit.exact()"


class Backend:
    """Base class of kernels: `unsupported_reasons(inputs)` gives the limits, calling it computes.

    Subclasses define `reasons` and `compute`. Reasons are generators, so that `serves` stops at the
    first reason and the texts of the others are never made.
    """

    name: str
    normalizers: tuple[type[Normalizer], ...] = (Softmax,)
    """The types of normalizers that it computes."""
    needs_mask = ""
    """A description of the mask that it needs; "" if it needs none."""
    has_sink = False
    """Whether it computes a sink."""
    reads_edges = False
    """Whether it reads edges one by one, with their features, and not as a boolean mask."""
    is_exact = False
    """Whether it keeps the promises of `attnkit.exact`."""
    has_all_derivatives = False
    """Whether it has derivatives of all orders and in forward mode; otherwise only the gradient."""

    def unsupported_reasons(self, inputs: Inputs) -> Iterator[str]:
        """Yield every reason why this kernel cannot compute the inputs; nothing if it can."""
        if not isinstance(inputs.normalizer, self.normalizers):
            names = " or ".join(normalizer.__name__ for normalizer in self.normalizers)
            yield f"needs the normalizer {names}, got {inputs.normalizer}"
            return
        serves = True
        if self.needs_mask and inputs.mask is None:
            serves = False
            yield f"needs {self.needs_mask}, got no mask"
        if inputs.sink is not None and not self.has_sink:
            serves = False
            yield "has no sink"
        for reason in self.reasons(inputs):
            serves = False
            yield reason
        if EXACT.get():
            for reason in exact_reasons(inputs) if self.is_exact else (NOT_EXACT,):
                serves = False
                yield reason
        if isinstance(inputs.mask, Edges) and not self.reads_edges:
            if inputs.edge_features is not None:
                yield "cannot read edge features"
            elif serves and (torch.compiler.is_compiling() or inputs.mask.has_repeated):
                yield "reads a boolean mask, which cannot hold duplicate edges"
        if not self.has_all_derivatives and wants_more_than_gradient(inputs.tensors()):
            yield (
                "has the gradient alone, no second derivative and none in forward mode; "
                "backend='reference' has"
            )

    def serves(self, inputs: Inputs) -> bool:
        """Return whether this kernel can compute the inputs."""
        return next(self.unsupported_reasons(inputs), None) is None

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        """Yield the reasons that are particular to this kernel."""
        raise NotImplementedError

    def pays(self, inputs: Inputs) -> bool:
        """Return whether "auto" should take this kernel if it can compute the inputs."""
        return True

    def compute(self, inputs: Inputs) -> Tensor:
        """Compute the attention's output, [batch, heads, queries, value_dim]."""
        raise NotImplementedError

    def share(self, inputs: Inputs) -> float | None:
        """Return the share of queries × keys that it computes; None if that is all, or unknown."""
        return None

    def __call__(self, inputs: Inputs) -> Tensor:
        """Call `compute`, and report it to `record_backends`."""
        output = self.compute(inputs)
        note_kernel(self.name, partial(self.share, inputs))
        return output


def wants_more_than_gradient(tensors: Iterable[object]) -> bool:
    """Return whether one of the tensors takes part in forward mode, or torch.func takes a second
    derivative. A second derivative by autograd cannot be known in the forward."""
    if torch.compiler.is_compiling() or (
        forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()
    ):
        return False
    kinds = [level.key() for level in get_interpreter_stack() or ()]
    return has_tangent(tensors) or kinds.count(TransformType.Grad) > 1


def device_reasons(inputs: Inputs, *device_types: str) -> Iterator[str]:
    """Yield a reason if the tensors are not on one of these types of device."""
    device_type = inputs.query.device.type
    if device_type not in device_types:
        yield f"needs tensors on {' or '.join(device_types)}, got {device_type}"


def dot_product_reasons(inputs: Inputs, *, needs_positive_scale: bool = True) -> Iterator[str]:
    """Yield the reasons why a kernel that computes scaled dot products only cannot compute the
    score.

    Fused kernels need a positive scale, since they write −inf before they scale, and keep a running
    maximum of unscaled scores.
    """
    score = inputs.score
    if inputs.dot_dim is None:
        yield f"needs a scaled dot-product score, got {score}"
        return
    if score.softcap is not None:
        yield f"cannot compute a softcap, got {score.softcap}"
    if needs_positive_scale and isinstance(score, ScaledDot) and inputs.scale <= 0:
        yield f"needs a positive scale, got {inputs.scale}"


def dropout_reasons(inputs: Inputs) -> Iterator[str]:
    """Yield a reason if there is dropout, for a kernel without it."""
    if inputs.dropout_p > 0:
        yield f"has no dropout, got dropout_p={inputs.dropout_p}"


def bias_gradient_reasons(inputs: Inputs) -> Iterator[str]:
    """Yield a reason if the bias needs a gradient, for a kernel that computes none."""
    if inputs.bias is not None and inputs.bias.requires_grad:
        yield "has no gradient for the bias, which requires one"


def exact_reasons(inputs: Inputs) -> Iterator[str]:
    """Yield the reasons why an exact kernel cannot compute the inputs inside `attnkit.exact`."""
    score = inputs.score
    if torch.compiler.is_compiling():
        yield "cannot be exact in a compiled program; call it uncompiled inside attnkit.exact()"
    if not isinstance(score, ScaledDot | Additive):
        yield f"has no exact score but 'scaled_dot', 'dot' and Additive, got {score}"
    if inputs.dropout_p > 0:
        yield (
            f"draws dropout for the whole batch, inside attnkit.exact(), got "
            f"dropout_p={inputs.dropout_p}; give 0, or put the model in evaluation mode"
        )
    if inputs.sink is not None:
        yield "has no exact sink"
    if inputs.edge_features is not None:
        yield "has no exact edge features"


def functorch_reasons() -> Iterator[str]:
    """Yield a reason inside torch.func's transforms, for a kernel with a backward of its own."""
    if torch._C._are_functorch_transforms_active():
        yield "does not support torch.func"


def empty_reasons(inputs: Inputs) -> Iterator[str]:
    """Yield a reason if a tensor is empty, for a kernel that does not support this."""
    if inputs.is_empty:
        yield (
            f"needs sizes above zero, got query {list(inputs.query.shape)}, "
            f"key {list(inputs.key.shape)}, value {list(inputs.value.shape)}"
        )


def unwritten(mask: Mask | None, named: Mapping[str, Tensor]) -> Callable[[], None]:
    """Return a function that raises RuntimeError if the mask or a named tensor was written to
    since, as far as torch counts writes; for a backward that reads them again."""
    if torch.compiler.is_compiling():
        return lambda: None
    read = [("mask", tensor) for tensor in tensors_within(mask)] + list(named.items())
    then = [(name, t, t._version) for name, t in read if not t.is_inference()]

    def check() -> None:
        for name, tensor, version in then:
            if tensor._version != version:
                raise RuntimeError(
                    f"{name}: its numbers were written to between forward and backward; give each "
                    f"call a {name} of its own, or write after the backward"
                )

    return check


def with_channels(tensor: Tensor, size: int) -> Tensor:
    """Return the tensor padded with zeros to `size` channels; the tensor itself if it has them."""
    missing = size - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def channels_in_order(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy, with contiguous channels."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def first_channels(tensor: Tensor, size: int) -> Tensor:
    """Return the first `size` channels; the tensor itself if it has no more, because the backward
    of a slice copies the gradient."""
    return tensor if tensor.shape[-1] == size else tensor[..., :size]


def multiple_of_8(size: int) -> int:
    """Return the next multiple of 8, the number of channels that fused kernels read at once."""
    return -(-size // 8) * 8


def are_known(*sizes: int) -> bool:
    """Return whether the sizes are known numbers. A symbolic size of an exported program is not,
    and the program must not depend on its value."""
    return not torch.compiler.is_exporting() or all(map(has_static_value, sizes))


def add_sink_(output: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Add a sink [..., 1, 1] to the softmax of a fused kernel, by its log-sum-exps [..., rows, 1].

        lse' = log(e^lse + e^sink),   output' = output · e^(lse − lse') = output · σ(lse − sink)

    Writes output' over the output and returns lse'. A fused backward that is given output' and lse'
    in the place of its own computes exactly the gradients of query, key and value.
    """
    output.mul_(torch.sigmoid(lse - sink))
    return torch.logaddexp(lse, sink)


def sink_gradient(sink: Tensor, lse: Tensor, *pairs: tuple[Tensor, Tensor | None]) -> Tensor:
    """Compute −Σ_i e^(sink − lse'_i) (gradient_i · output'_i), summed over the pairs of an output'
    and its gradient; None is a gradient of 0."""
    products = [
        (output * gradient).sum(dim=-1, keepdim=True, dtype=lse.dtype)
        for output, gradient in pairs
        if gradient is not None
    ]
    share = (sink - lse).exp()
    return -(share * sum(products)).sum_to_size(sink.shape)


def explain_missing_second_derivative(output: Tensor, backend: str) -> None:
    """Make a second derivative through a kernel of torch without one raise a clear error, by a hook
    on the kernel's backward that acts only with create_graph."""
    if torch.compiler.is_compiling() or output.grad_fn is None:
        return
    if not torch._C._are_functorch_transforms_active():
        output.grad_fn.register_hook(partial(_refusing_gradients, backend))


def _refusing_gradients(
    backend: str, gradients: tuple[Tensor | None, ...], _: object
) -> tuple[Tensor | None, ...] | None:
    if not torch.is_grad_enabled():
        return None
    message = (
        f"the backend {backend!r} has no second derivative (create_graph=True); backend='math' has"
    )
    refuse: Any = torch._C._functions.DelayedError(message.encode(), len(gradients))
    return refuse(*gradients)


def refuse_second_derivative(backend: str, *tensors: Tensor | None) -> None:
    """Raise RuntimeError if autograd would have to differentiate a backward of ours; it cannot, and
    would silently leave that part out."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"the backend {backend!r} has no second derivative (create_graph=True); "
            "backend='reference' has"
        )


_COUNTED: Opened[bool] = Opened("counted code")


def by_operators() -> AbstractContextManager[object]:
    """Compute edges by torch's operators in the block, because torch cannot count other kernels."""
    return _COUNTED.opened(True)


def computes_by_operators() -> bool:
    """Return whether the code runs inside `by_operators`."""
    return bool(_COUNTED.get())
