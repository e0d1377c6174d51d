"""The base of all kernels: what each can serve, when it is worthwhile, and its computation."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import has_static_value
from torch.nn import functional as F

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.record import note_kernel
from attnkit.core.masks.base import Mask
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.kept import tensors_within
from attnkit.core.normalizers import Normalizer, Softmax
from attnkit.core.operators.modes import has_tangent
from attnkit.core.operators.precision import EXACT
from attnkit.core.scores.additive import Additive
from attnkit.core.scores.kinds import ScaledDot

TRACED_PARTS = 16
"""About how many parts of its work a kernel does one after the other in a program of torch.compile,
which holds the operators of each part."""

NOT_EXACT = "gives bits that may depend on the batch or on threads, inside attnkit.exact()"

_IS_COUNTED = ContextVar("_IS_COUNTED", default=False)


class Backend:
    """One kernel: `unsupported_reasons(inputs)` gives its limits, calling it computes.

    Subclasses define `reasons` and `compute`. Reasons are generators: whether a kernel serves is
    known at the first one, and the text of the others is never made.
    """

    name: str
    normalizers: tuple[type[Normalizer], ...] = (Softmax,)
    """The normalizers it computes."""
    needs_mask = ""
    """What mask it is for, if it is for one alone; it serves nothing without a mask."""
    has_sink = False
    """Whether it computes a sink."""
    reads_edges = False
    """Whether it reads edges one by one, with what they carry, or as a boolean mask."""
    is_exact = False
    """Whether it keeps what `attnkit.exact` promises."""
    has_all_derivatives = False
    """Whether it has derivatives of all orders, also in forward mode, or the gradient alone."""

    def unsupported_reasons(self, inputs: Inputs) -> Iterator[str]:
        """Every reason why this kernel cannot serve the inputs; none if it can."""
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
        """Whether this kernel can serve the inputs."""
        return next(self.unsupported_reasons(inputs), None) is None

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        """`unsupported_reasons` other than the normalizer and what edges carry."""
        raise NotImplementedError

    def pays(self, inputs: Inputs) -> bool:
        """Whether "auto" should take this kernel where it can serve."""
        return True

    def compute(self, inputs: Inputs) -> Tensor:
        """The attention's output, [batch, heads, queries, value_dim]."""
        raise NotImplementedError

    def share(self, inputs: Inputs) -> float | None:
        """What it computes of queries × keys; None where that is all, or not known."""
        return None

    def __call__(self, inputs: Inputs) -> Tensor:
        """`compute`, noted for `record_backends`."""
        output = self.compute(inputs)
        note_kernel(self.name, partial(self.share, inputs))
        return output


def wants_more_than_gradient(tensors: Iterable[object]) -> bool:
    """Whether forward mode goes through one of the tensors, or torch.func differentiates in a
    derivative. Where autograd differentiates again, nobody knows yet."""
    if torch.compiler.is_compiling() or (
        forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()
    ):
        return False
    kinds = [level.key() for level in get_interpreter_stack() or ()]
    return has_tangent(tensors) or kinds.count(TransformType.Grad) > 1


def device_reasons(inputs: Inputs, *device_types: str) -> Iterator[str]:
    """Why a kernel that runs on these types of device cannot run where the tensors are."""
    device_type = inputs.query.device.type
    if device_type not in device_types:
        yield f"needs tensors on {' or '.join(device_types)}, got {device_type}"


def dot_product_reasons(inputs: Inputs, *, needs_positive_scale: bool = True) -> Iterator[str]:
    """Why a kernel of scaled dot products, and of nothing else, cannot compute the score.

    Fused kernels write −inf before they scale, and keep a running maximum of unscaled scores: they
    need a positive scale.
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
    """Why a kernel without dropout refuses."""
    if inputs.dropout_p > 0:
        yield f"has no dropout, got dropout_p={inputs.dropout_p}"


def bias_gradient_reasons(inputs: Inputs) -> Iterator[str]:
    """Why a kernel that computes no gradient of the bias refuses."""
    if inputs.bias is not None and inputs.bias.requires_grad:
        yield "has no gradient for the bias, which requires one"


def exact_reasons(inputs: Inputs) -> Iterator[str]:
    """Why a kernel that is exact refuses inside `attnkit.exact`."""
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
    """Why a kernel with a backward of its own refuses inside of torch.func's transforms."""
    if torch._C._are_functorch_transforms_active():
        yield "does not support torch.func"


def empty_reasons(inputs: Inputs) -> Iterator[str]:
    """Why a kernel that needs something to compute refuses empty inputs."""
    if inputs.is_empty:
        yield (
            f"needs sizes above zero, got query {list(inputs.query.shape)}, "
            f"key {list(inputs.key.shape)}, value {list(inputs.value.shape)}"
        )


def unwritten(mask: Mask | None, named: Mapping[str, Tensor]) -> Callable[[], None]:
    """For a backward that reads the mask and these tensors again: a function that raises
    RuntimeError where they were written to since, as far as torch counts that."""
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
    """The tensor with zeros after its channels, up to that many; itself where none are missing."""
    missing = size - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def channels_in_order(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, with its channels beside each other."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def first_channels(tensor: Tensor, size: int) -> Tensor:
    """The first channels; the tensor itself if it has no more: a slice copies the gradient."""
    return tensor if tensor.shape[-1] == size else tensor[..., :size]


def multiple_of_8(size: int) -> int:
    """The next one: what fused kernels read at once."""
    return -(-size // 8) * 8


def are_known(*sizes: int) -> bool:
    """Whether these are numbers, and none stands for any number in an exported program, which then
    must not depend on how large it is."""
    return not torch.compiler.is_exporting() or all(map(has_static_value, sizes))


def add_sink_(output: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Add a sink [..., 1, 1] to the softmax of a fused kernel, by its log-sum-exps [..., rows, 1]:

        lse' = log(e^lse + e^sink),   output' = output · e^(lse − lse') = output · σ(lse − sink)

    Writes output' over the output and returns lse'. A fused backward that is given these in the
    place of its own gives exactly the gradients of query, key and value.
    """
    output.mul_(torch.sigmoid(lse - sink))
    return torch.logaddexp(lse, sink)


def sink_gradient(sink: Tensor, lse: Tensor, *pairs: tuple[Tensor, Tensor | None]) -> Tensor:
    """−Σ_i e^(sink − lse'_i) (gradient_i · output'_i), for outputs' with their gradients, of which
    None is 0."""
    products = [
        (output * gradient).sum(dim=-1, keepdim=True, dtype=lse.dtype)
        for output, gradient in pairs
        if gradient is not None
    ]
    share = (sink - lse).exp()
    return -(share * sum(products)).sum_to_size(sink.shape)


def name_what_has_a_second_derivative(output: Tensor, backend: str) -> None:
    """Where a second derivative would go through a kernel of torch that has none, let the error say
    so: a hook on the kernel's backward, which does nothing but under create_graph."""
    if torch.compiler.is_compiling() or output.grad_fn is None:
        return
    if not torch._C._are_functorch_transforms_active():
        output.grad_fn.register_hook(partial(_refusing_gradients, backend))


def _refusing_gradients(
    backend: str, gradients: tuple[Tensor | None, ...], _: object
) -> tuple[Tensor | None, ...] | None:
    if not torch.is_grad_enabled():
        return None
    return tuple(None if g is None else _NoSecondDerivative.apply(g, backend) for g in gradients)


class _NoSecondDerivative(torch.autograd.Function):
    """The identity on a gradient; differentiating it once more is an error."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, backend: str) -> Tensor:
        ctx.backend = backend
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        raise RuntimeError(
            f"the backend {ctx.backend!r} has no second derivative (create_graph=True); "
            "backend='math' has"
        )


def refuse_second_derivative(backend: str, *tensors: Tensor | None) -> None:
    """RuntimeError where autograd would have to differentiate a backward of ours, which it
    cannot follow, and would silently leave that part out."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"the backend {backend!r} has no second derivative (create_graph=True); "
            "backend='reference' has"
        )


@contextmanager
def by_operators() -> Iterator[None]:
    """In the block torch's operators compute edges, which torch can count as it cannot others."""
    token = _IS_COUNTED.set(True)
    try:
        yield
    finally:
        _IS_COUNTED.reset(token)


def computes_by_operators() -> bool:
    """Whether this is such a block."""
    return _IS_COUNTED.get()
