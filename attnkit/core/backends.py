"""The kernels: what each can do, in which order they are preferred, and how they are run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnkit.core.backend import Backend, dot_product_reasons, empty_reasons
from attnkit.core.blockwise import blockwise_attention
from attnkit.core.delta_rule import DeltaRuleAttention
from attnkit.core.edges import EdgeAttention
from attnkit.core.flex import Flex
from attnkit.core.graph import Edges
from attnkit.core.hard import HardAttention
from attnkit.core.inputs import Inputs, check_inputs
from attnkit.core.linear import LinearAttention
from attnkit.core.normalizers import Normalizer, Softmax
from attnkit.core.packed import PackedSequences
from attnkit.core.query_parts import joined_parts, num_query_parts, split_queries
from attnkit.core.record import note_kernel
from attnkit.core.reference import reference_attention
from attnkit.core.windows import Windowed

__all__ = ["BACKENDS", "Backend", "UnsupportedError", "choose_backend", "explain_backends"]


class UnsupportedError(ValueError):
    """The backend that was asked for cannot do what was asked; the message gives every reason."""


class Reference(Backend):
    """The definition itself: serves everything, fast at nothing."""

    name = "reference"
    normalizers = (Normalizer,)
    reads_edges = True

    def reasons(self, inputs: Inputs) -> list[str]:
        if inputs.normalizer.draws:
            return ["draws no keys at random"]
        mask, normalizer = inputs.mask, inputs.normalizer
        if isinstance(mask, Edges) and not isinstance(normalizer, Softmax) and mask.has_repeated:
            return [f"an edge is given twice, which {normalizer} does not count"]
        return []

    def __call__(self, inputs: Inputs) -> Tensor:
        note_kernel("reference")
        return reference_attention(inputs)


class Blockwise(Backend):
    """Any score in blocks of queries, computed again in the backward: no queries × keys memory."""

    name = "blockwise"

    def reasons(self, inputs: Inputs) -> list[str]:
        return empty_reasons(inputs)

    def __call__(self, inputs: Inputs) -> Tensor:
        note_kernel("blockwise")
        return blockwise_attention(inputs)


class Sdpa(Backend):
    """A kernel of torch's scaled_dot_product_attention, forced by `sdpa_kernel`.

    Subclasses declare their limits per device type; what a kernel cannot read but exact algebra
    can give it (unequal head dimensions, grouped heads) is lowered rather than refused.
    """

    kernel: SDPBackend
    device_types: tuple[str, ...] = ("cpu", "cuda")
    serves_grouped = True
    # CUDA's fused kernels do not promise 0 for a row without keys; the CPU's and math do
    guards_dead_rows = False
    needs_positive_scale = True
    needs_unit_stride = True

    def reasons(self, inputs: Inputs) -> list[str]:
        device_type = inputs.query.device.type
        if device_type not in self.device_types:
            return [f"runs on {' and '.join(self.device_types)}, the tensors are on {device_type}"]
        reasons = empty_reasons(inputs) + dot_product_reasons(
            inputs, needs_positive_scale=self.needs_positive_scale
        )
        if inputs.dot_dim is None:  # and there is no head dimension to speak of
            return reasons
        return reasons + (
            self.cuda_reasons(inputs) if device_type == "cuda" else self.cpu_reasons(inputs)
        )

    def cpu_reasons(self, inputs: Inputs) -> list[str]:
        return []

    def cuda_reasons(self, inputs: Inputs) -> list[str]:
        return []

    def head_dims(self, inputs: Inputs) -> tuple[int, int]:
        """The head dimensions of query/key and of value that the kernel wants, padded with 0."""
        return _dot_dim(inputs), inputs.value.shape[3]

    def readable(self, tensor: Tensor, head_dim: int) -> Tensor:
        """A tensor as the kernel can read it: padded, and its channels beside each other."""
        missing = head_dim - tensor.shape[-1]
        if missing:
            # zeros add nothing to the scores, and to the output only columns that are cut off again
            return F.pad(tensor, (0, missing))
        if self.needs_unit_stride and tensor.stride(-1) != 1:
            return tensor.clone(memory_format=torch.contiguous_format)
        return tensor

    def __call__(self, inputs: Inputs) -> Tensor:
        inputs = inputs.lowered()
        query, key, value = inputs.query, inputs.key, inputs.value
        head_dim, value_dim = self.head_dims(inputs)
        grouped = inputs.is_grouped
        if grouped and not self.serves_grouped:
            key, value = inputs.repeated_heads()
            grouped = False
        term, alive = inputs.term(), None
        if term is not None and self.guards_dead_rows and query.is_cuda:
            term, alive = _revive(term)
        with sdpa_kernel(self.kernel):
            output = F.scaled_dot_product_attention(
                self.readable(query, head_dim),
                self.readable(key, head_dim),
                self.readable(value, value_dim),
                attn_mask=term,
                dropout_p=inputs.dropout_p,
                is_causal=inputs.is_causal and term is None,
                scale=inputs.scale,
                enable_gqa=grouped,
            )
        output = output[..., : inputs.value.shape[3]]
        return output if alive is None else output.masked_fill(~alive, 0.0)


class Flash(Sdpa):
    """FlashAttention: torch's own on CPU, FlashAttention-2 on CUDA."""

    name = "flash"
    kernel = SDPBackend.FLASH_ATTENTION

    def head_dims(self, inputs: Inputs) -> tuple[int, int]:
        largest = max(_dot_dim(inputs), inputs.value.shape[3])
        return largest, largest

    def __call__(self, inputs: Inputs) -> Tensor:
        num_parts = num_query_parts(inputs)
        if num_parts == 1:
            return super().__call__(inputs)
        inputs = inputs.lowered()
        return joined_parts(super().__call__(split_queries(inputs, num_parts)), inputs)

    def cpu_reasons(self, inputs: Inputs) -> list[str]:
        reasons = []
        if inputs.dropout_p > 0:
            reasons.append(f"dropout_p={inputs.dropout_p}: the CPU's kernel has no dropout")
        if inputs.bias is not None and inputs.bias.requires_grad:
            reasons.append("bias requires a gradient, which the CPU's kernel does not compute")
        return reasons

    def cuda_reasons(self, inputs: Inputs) -> list[str]:
        reasons = _half_precision_reasons(inputs) + _capability_reasons(inputs)
        if max(self.head_dims(inputs)) > 256:
            reasons.append(f"head_dim is at most 256, got {max(self.head_dims(inputs))}")
        if inputs.has_term:
            reasons.append("reads no mask or bias but causal on CUDA")
        elif inputs.is_causal and inputs.num_queries != inputs.num_keys:
            reasons.append(
                "causal needs as many queries as keys on CUDA, "
                f"got {inputs.num_queries} and {inputs.num_keys}"
            )
        return reasons


class Cudnn(Sdpa):
    """cuDNN's fused attention."""

    name = "cudnn"
    kernel = SDPBackend.CUDNN_ATTENTION
    device_types = ("cuda",)
    guards_dead_rows = True

    def head_dims(self, inputs: Inputs) -> tuple[int, int]:
        return _multiple_of_8(_dot_dim(inputs)), _multiple_of_8(inputs.value.shape[3])

    def cuda_reasons(self, inputs: Inputs) -> list[str]:
        reasons = _half_precision_reasons(inputs) + _capability_reasons(inputs)
        if max(self.head_dims(inputs)) > 128:
            reasons.append(f"head_dim is at most 128, got {max(self.head_dims(inputs))}")
        if inputs.bias is not None and inputs.bias.requires_grad:
            reasons.append("bias requires a gradient, which this kernel does not compute")
        if inputs.is_causal and not inputs.has_term and inputs.num_queries != inputs.num_keys:
            reasons.append(
                "causal needs as many queries as keys, "
                f"got {inputs.num_queries} and {inputs.num_keys}"
            )
        if 1 in (inputs.num_queries, inputs.num_keys):
            reasons.append("needs more than one query and one key")
        return reasons


class Efficient(Sdpa):
    """Memory-efficient attention (Rabe and Staats 2021; xformers' kernel)."""

    name = "efficient"
    kernel = SDPBackend.EFFICIENT_ATTENTION
    device_types = ("cuda",)
    serves_grouped = False
    guards_dead_rows = True

    def head_dims(self, inputs: Inputs) -> tuple[int, int]:
        return _multiple_of_8(_dot_dim(inputs)), _multiple_of_8(inputs.value.shape[3])

    def cuda_reasons(self, inputs: Inputs) -> list[str]:
        if inputs.query.dtype == torch.float64:
            return ["computes in float32, bfloat16 and float16, got torch.float64"]
        return []


class Math(Sdpa):
    """torch's composition of matrix products and softmax; holds all scores in memory."""

    name = "math"
    kernel = SDPBackend.MATH
    device_types = ("cpu", "cuda", "mps", "xpu")
    needs_positive_scale = False
    needs_unit_stride = False


BACKENDS: tuple[Backend, ...] = (
    EdgeAttention(),
    PackedSequences(lambda inputs: choose_backend(inputs)),
    Windowed(),
    Flex(),
    Flash(),
    Cudnn(),
    Efficient(),
    LinearAttention(),
    DeltaRuleAttention(),
    Blockwise(),
    HardAttention(),
    Math(),
    Reference(),
)
"""The kernels in order of preference; those that read a mask's own structure come first."""


def named_backend(name: str) -> Backend | None:
    """The backend of that name, None for "auto"; ValueError lists the names there are."""
    if name == "auto":
        return None
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    names = ", ".join(backend.name for backend in BACKENDS)
    raise ValueError(f"backend: expected 'auto' or one of {names}, got {name!r}")


def choose_backend(inputs: Inputs, name: str = "auto") -> Backend:
    """The named backend, or the first that can serve the inputs and pays.

    UnsupportedError if a named one cannot, with every reason; ValueError for an unknown name.
    """
    backend = named_backend(name)
    if backend is None:
        for backend in BACKENDS:
            if not backend.unsupported_reasons(inputs) and backend.pays(inputs):
                return backend
        why = dict.fromkeys(reason for b in BACKENDS for reason in b.unsupported_reasons(inputs))
        raise UnsupportedError(f"no backend can serve this attention: {'; '.join(why)}")
    if reasons := backend.unsupported_reasons(inputs):
        raise UnsupportedError(
            f"backend={name!r} cannot serve this attention: {'; '.join(reasons)}"
        )
    return backend


@dataclass(frozen=True)
class Explanation:
    """Per backend, in order of preference, why it cannot serve; `str()` is a table."""

    reasons: dict[str, list[str]]
    chosen: str
    """The backend that `backend="auto"` takes: the first that can and pays at these sizes."""

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        lines = []
        for name, reasons in self.reasons.items():
            verdict = "; ".join(reasons) or ("chosen" if name == self.chosen else "can")
            lines.append(f"{name:<{width}}  {verdict}")
        return "\n".join(lines)


def explain_backends(query: Tensor, key: Tensor, value: Tensor, **options) -> Explanation:
    """Which kernels can serve `attend(query, key, value, **options)`, and why the others cannot.

    Takes `attend`'s options but `backend`; computes nothing.

        print(attnkit.explain_backends(query, key, value, mask=attnkit.Causal(), dropout_p=0.1))
    """
    inputs = check_inputs(query, key, value, **options)
    reasons = {kernel.name: kernel.unsupported_reasons(inputs) for kernel in BACKENDS}
    return Explanation(reasons, choose_backend(inputs).name)


def _half_precision_reasons(inputs: Inputs) -> list[str]:
    dtype = inputs.query.dtype
    if dtype in (torch.float16, torch.bfloat16):
        return []
    return [f"computes in float16 and bfloat16 on CUDA, got {dtype}"]


def _capability_reasons(inputs: Inputs) -> list[str]:
    major, minor = torch.cuda.get_device_capability(inputs.query.device)
    if major >= 8:
        return []
    return [f"needs a GPU of compute capability 8.0 or newer, this one has {major}.{minor}"]


def _dot_dim(inputs: Inputs) -> int:
    assert inputs.dot_dim is not None  # the first of the reasons
    return inputs.dot_dim


def _multiple_of_8(size: int) -> int:
    return -(-size // 8) * 8


def _revive(term: Tensor) -> tuple[Tensor, Tensor]:
    """Let rows that may look nowhere look everywhere, and say which rows are alive."""
    if term.dtype == torch.bool:
        alive = term.any(dim=-1, keepdim=True)
        return term | ~alive, alive
    alive = (term != -torch.inf).any(dim=-1, keepdim=True)
    return term.masked_fill(~alive, 0.0), alive
