"""The kernels of torch's scaled_dot_product_attention.

On the CPU, the backward of torch's flash kernel is parallel over batch items and heads only: with
one item of one head all threads but one are idle. Rows of attention do not depend on each other, so
a part of the queries, with all keys, can be a batch item of its own; the gradients of keys and
values are then sums over the parts.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import flash_sdp_enabled
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnkit.core.inputs import Inputs
from attnkit.core.kernels import ledger
from attnkit.core.kernels.base import (
    Backend,
    add_sink_,
    bias_gradient_reasons,
    channels_in_order,
    device_reasons,
    dot_product_reasons,
    dropout_reasons,
    empty_reasons,
    explain_missing_second_derivative,
    first_channels,
    functorch_reasons,
    multiple_of_8,
    refuse_second_derivative,
    sink_gradient,
    wants_more_than_gradient,
    with_channels,
)
from attnkit.core.kernels.record import note_kernel

flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_cuda = torch.ops.aten._scaled_dot_product_flash_attention
flash_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
LEAST_QUERIES = 256  # queries of a part: with fewer, splitting costs as much as it gains


CUDNN_PAYS = 2**31
"""Products of channels of queries and keys. With fewer, a step takes as long as the processor needs
to launch it: on an H200 0.48 ms with cuDNN, 0.16 with torch's flash."""


class Sdpa(Backend):
    """Base class of the kernels of torch's scaled_dot_product_attention, forced by `sdpa_kernel`.

    Subclasses declare their limits per device type. Inputs that a kernel cannot read but that exact
    algebra can convert (unequal head dimensions, grouped heads) are converted and not refused.
    """

    kernel: SDPBackend
    device_types: tuple[str, ...] = ("cpu", "cuda")
    serves_grouped = True
    # CUDA's fused kernels do not promise 0 for a row without keys, and a program exported to ONNX
    # gives NaN; the CPU's kernels and math give 0
    guards_dead_rows = False
    needs_positive_scale = True
    needs_unit_stride = True

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        yield from device_reasons(inputs, *self.device_types)
        yield from empty_reasons(inputs)
        yield from dot_product_reasons(inputs, needs_positive_scale=self.needs_positive_scale)
        if inputs.dot_dim is not None and inputs.query.device.type in self.device_types:
            on_cuda = inputs.query.is_cuda
            yield from self.cuda_reasons(inputs) if on_cuda else self.cpu_reasons(inputs)

    def cpu_reasons(self, inputs: Inputs) -> Iterator[str]:
        return iter(())

    def cuda_reasons(self, inputs: Inputs) -> Iterator[str]:
        return iter(())

    def head_dims(self, inputs: Inputs) -> tuple[int, int]:
        """Return the head dimensions of query/key and of value that the kernel needs."""
        return _dot_dim(inputs), inputs.value.shape[3]

    def readable(self, tensor: Tensor, head_dim: int) -> Tensor:
        """Return the tensor as the kernel can read it: zero-padded, with contiguous channels."""
        if tensor.shape[-1] != head_dim:
            # zeros change no score, and add columns to the output that are cut off again
            return with_channels(tensor, head_dim)
        if self.needs_unit_stride and tensor.stride(-1) != 1:
            return tensor.clone(memory_format=torch.contiguous_format)
        return tensor

    def __call__(self, inputs: Inputs) -> Tensor:
        return self.compute(inputs)  # `record_backends` observes torch's operator itself

    def forced(self, query: Tensor) -> AbstractContextManager:
        """Return a context in which torch takes this kernel."""
        return sdpa_kernel(self.kernel)

    def compute(self, inputs: Inputs) -> Tensor:
        inputs = inputs.as_scaled_dot()
        if inputs.sink is not None:
            return self.with_sink(inputs)
        query, key, value = inputs.query, inputs.key, inputs.value
        head_dim, value_dim = self.head_dims(inputs)
        grouped = inputs.is_grouped
        if grouped and not self.serves_grouped:
            key, value = inputs.repeated_heads()
            grouped = False
        term, alive = inputs.attn_mask(), None
        is_guarded = torch.compiler.is_exporting() or (self.guards_dead_rows and query.is_cuda)
        if term is not None and is_guarded:
            term, alive = revive(term)
        with self.forced(query):
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
        if self.kernel != SDPBackend.MATH:
            explain_missing_second_derivative(output, self.name)
        output = first_channels(output, inputs.value.shape[3])
        return output if alive is None else output.masked_fill(~alive, 0.0)

    def with_sink(self, inputs: Inputs) -> Tensor:
        """Compute attention with a sink, whose score is a scaled dot product."""
        return self.compute(inputs.sink_as_key())


class Flash(Sdpa):
    """FlashAttention: torch's own on CPU, FlashAttention-2 on CUDA."""

    name = "flash"
    kernel = SDPBackend.FLASH_ATTENTION
    has_sink = True

    def head_dims(self, inputs: Inputs) -> tuple[int, int]:
        largest = max(_dot_dim(inputs), inputs.value.shape[3])
        return largest, largest

    def forced(self, query: Tensor) -> AbstractContextManager:
        # forcing takes as long as a step, and is not needed for torch's own first choice
        return nullcontext() if is_first_choice(query) else super().forced(query)

    def compute(self, inputs: Inputs) -> Tensor:
        num_parts = num_query_parts(inputs)
        if num_parts == 1:
            return super().compute(inputs)
        inputs = inputs.as_scaled_dot()
        return joined_parts(super().compute(split_queries(inputs, num_parts)), inputs)

    def with_sink(self, inputs: Inputs) -> Tensor:
        if torch.compiler.is_exporting():  # the program may run on other devices, or in ONNX
            return super().with_sink(inputs)
        assert inputs.sink is not None
        dim = self.head_dims(inputs)[0]
        dim = multiple_of_8(dim) if inputs.query.is_cuda else dim
        tensors = (inputs.query, *inputs.repeated_heads())
        output = _FlashWithSink.apply(
            *(self.readable(tensor, dim) for tensor in tensors),
            inputs.sink[:, None, None],
            inputs.attn_mask(),
            (inputs.dropout_p, inputs.is_causal and not inputs.has_attn_mask),
            inputs.scale,
        )
        note_kernel(self.name)
        return first_channels(output, inputs.value.shape[3])

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        yield from super().reasons(inputs)
        if inputs.sink is not None:
            yield from functorch_reasons()
            if torch.compiler.is_exporting() and inputs.sink.requires_grad:
                yield "has no gradient for the sink in an exported program"

    def cpu_reasons(self, inputs: Inputs) -> Iterator[str]:
        yield from dropout_reasons(inputs)
        yield from bias_gradient_reasons(inputs)

    def cuda_reasons(self, inputs: Inputs) -> Iterator[str]:
        yield from half_precision_reasons(inputs)
        yield from capability_reasons(inputs)
        if max(self.head_dims(inputs)) > 256:
            yield f"needs a head_dim of at most 256, got {max(self.head_dims(inputs))}"
        if inputs.has_attn_mask:
            yield "cannot read a mask or bias but Causal on CUDA"
        elif inputs.is_causal:
            yield from _square_reasons(inputs)

    def pays(self, inputs: Inputs) -> bool:
        return not (inputs.query.is_cuda and _is_short(inputs))


class _FlashWithSink(torch.autograd.Function):
    """torch's flash kernels with a sink [heads, 1, 1]; `options` are dropout_p and is_causal."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor,
        term: Tensor | None,
        options: tuple[float, bool],
        scale: float,
    ) -> Tensor:
        rest: list[Any] = []
        if query.is_cuda:
            output, lse, *rest = flash_cuda(query, key, value, *options, False, scale=scale)
        else:
            output, lse = flash_cpu(query, key, value, *options, attn_mask=term, scale=scale)
        rows = add_sink_(output, lse[..., None], sink)
        # the kernel's remaining results: offsets and lengths of sequences, and dropout's state
        ctx.lengths, ctx.options, ctx.scale = rest[2:4], options, scale
        kept = *rest[:2], *rest[4:6]
        ctx.save_for_backward(query, key, value, output, rows, sink, term, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: checkpoints do not give it a second time
        refuse_second_derivative("flash", *gradients, *saved)
        query, key, value, output, rows, sink, term, *kept = saved
        gradient = channels_in_order(gradients[0])
        given = gradient, query, key, value, output, rows[..., 0]
        if query.is_cuda:
            where = *kept[:2], *ctx.lengths, *ctx.options, *kept[2:]
            found = flash_cuda_backward(*given, *where, scale=ctx.scale)
        else:
            found = flash_cpu_backward(*given, *ctx.options, attn_mask=term, scale=ctx.scale)
        return *found, sink_gradient(sink, rows, (output, gradient)), None, None, None


def is_plain_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether plain attention of these tensors can go straight to torch's function, because
    "auto" would take `Flash` and `Flash` would call it with these tensors as they are.

    This is so on the CPU, unless the backward needs the queries in parts. At the size of a decoding
    step, checking and choosing take as long as computing.
    """
    if query.is_nested or key.is_nested or value.is_nested:  # these have no common shape to check
        return query.layout is key.layout is value.layout is torch.jagged
    shape, size = query.shape, key.shape
    return (
        is_first_choice(query)
        and query.dtype is key.dtype is value.dtype is torch.float32
        and len(shape) == 4
        and size == value.shape
        and shape[:2] == size[:2]
        and shape[3] == size[3]
        and 0 not in shape
        and 0 not in size
        and query.layout is key.layout is value.layout is torch.strided
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and may_split(query))
        and not wants_more_than_gradient((query, key, value))
        and (ledger.keeps_plain_flash or ledger.leaves_plain_flash())
    )


def is_first_choice(query: Tensor) -> bool:
    """Return whether torch takes flash of its own accord if flash supports the inputs."""
    return query.is_cpu and not torch.compiler.is_compiling() and flash_sdp_enabled()


def may_split(query: Tensor) -> bool:
    """Return whether batch items and heads leave at least half of the threads idle."""
    return 2 * query.shape[0] * query.shape[1] <= torch.get_num_threads()


class Cudnn(Sdpa):
    """cuDNN's fused attention."""

    name = "cudnn"
    kernel = SDPBackend.CUDNN_ATTENTION
    device_types = ("cuda",)
    guards_dead_rows = True

    def head_dims(self, inputs: Inputs) -> tuple[int, int]:
        return multiple_of_8(_dot_dim(inputs)), multiple_of_8(inputs.value.shape[3])

    def cuda_reasons(self, inputs: Inputs) -> Iterator[str]:
        yield from half_precision_reasons(inputs)
        yield from capability_reasons(inputs)
        if max(self.head_dims(inputs)) > 128:
            yield f"needs a head_dim of at most 128, got {max(self.head_dims(inputs))}"
        yield from bias_gradient_reasons(inputs)
        if inputs.is_causal and not inputs.has_attn_mask:
            yield from _square_reasons(inputs)
        if 1 in (inputs.num_queries, inputs.num_keys):
            yield "needs more than one query and one key"

    def pays(self, inputs: Inputs) -> bool:
        # Not with a mask or bias: since torch 2.11 the query's gradient can be NaN (pytorch 196678,
        # trl 7181). Masks, and causal models, are also where lengths change from step to step, and
        # each new length costs cuDNN up to a second (FunASR 3704).
        if inputs.has_attn_mask or inputs.is_causal or _is_short(inputs):
            return False
        if prod(inputs.query.shape) * inputs.num_keys < CUDNN_PAYS:
            return False
        # on the GPUs where torch itself prefers it; elsewhere flash is as fast
        return torch.cuda.get_device_capability(inputs.query.device) in ((9, 0), (10, 0))


def _is_short(inputs: Inputs) -> bool:
    """Return whether the blocks of flash and cuDNN would be mostly empty. On an H200 at 64 tokens
    cuDNN takes 1.3 times as long as `efficient` for forward and backward, flash 2.1 times; at 128
    cuDNN is the fastest, flash takes 1.2 times as long (docs/benchmarks.md)."""
    return max(inputs.num_queries, inputs.num_keys) <= 64


class Efficient(Sdpa):
    """Memory-efficient attention (Rabe and Staats 2021; xformers' kernel)."""

    name = "efficient"
    kernel = SDPBackend.EFFICIENT_ATTENTION
    device_types = ("cuda",)
    has_sink = True
    serves_grouped = False
    guards_dead_rows = True

    def head_dims(self, inputs: Inputs) -> tuple[int, int]:
        return multiple_of_8(_dot_dim(inputs)), multiple_of_8(inputs.value.shape[3])

    def cuda_reasons(self, inputs: Inputs) -> Iterator[str]:
        if inputs.query.dtype == torch.float64:
            yield "needs float32, bfloat16 or float16, got torch.float64"


class Math(Sdpa):
    """torch's composition of matrix products and softmax; holds all scores in memory."""

    name = "math"
    kernel = SDPBackend.MATH
    device_types = ("cpu", "cuda", "mps", "xpu")
    has_all_derivatives = True
    has_sink = True
    needs_positive_scale = False
    needs_unit_stride = False


def num_query_parts(inputs: Inputs) -> int:
    """Return the number of parts in which the queries should go through the CPU's flash kernel; 1:
    undivided.

    There are at most as many parts, over all items and heads, as threads, since each part holds
    gradients of keys and values of its own until they are summed. Masks and biases are not split,
    nor are calls without a backward: the forward is parallel anyway.
    """
    if not inputs.query.is_cpu or inputs.is_causal or inputs.has_attn_mask:
        return 1
    if torch.compiler.is_compiling():  # compiled code cannot read the number of threads
        return 1
    tensors = inputs.query, inputs.key, inputs.value
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if not (trains and may_split(inputs.query)):
        return 1
    num_lanes = inputs.query.shape[0] * inputs.query.shape[1]
    return max(1, min(torch.get_num_threads() // num_lanes, inputs.num_queries // LEAST_QUERIES))


def split_queries(inputs: Inputs, num_parts: int) -> Inputs:
    """Return the same attention with each part of the queries as a batch item of its own.

    The last part is padded with zeros. Keys and values of a single batch item are not copied.
    """
    missing = -inputs.num_queries % num_parts
    query = F.pad(inputs.query, (0, 0, 0, missing)) if missing else inputs.query
    key, value = (
        tensor[:, None].expand(-1, num_parts, -1, -1, -1).flatten(0, 1)
        for tensor in (inputs.key, inputs.value)
    )
    query = query.unflatten(2, (num_parts, -1)).transpose(1, 2).flatten(0, 1)
    return replace(inputs, query=query, key=key, value=value)


def joined_parts(output: Tensor, inputs: Inputs) -> Tensor:
    """Return the output of `inputs` from the output of its parts, without the padding; a view if
    the heads of a query are contiguous."""
    batch = inputs.query.shape[0]
    rows = output.transpose(1, 2).reshape(batch, -1, output.shape[1], output.shape[3])
    return rows[:, : inputs.num_queries].transpose(1, 2)


def half_precision_reasons(inputs: Inputs) -> Iterator[str]:
    """Yield a reason if the dtype is not float16 or bfloat16."""
    if inputs.query.dtype not in (torch.float16, torch.bfloat16):
        yield f"needs float16 or bfloat16 on CUDA, got {inputs.query.dtype}"


def capability_reasons(inputs: Inputs) -> Iterator[str]:
    """Yield a reason if the GPU is older than compute capability 8.0."""
    major, minor = torch.cuda.get_device_capability(inputs.query.device)
    if major < 8:
        yield f"needs a GPU of compute capability 8.0 or newer, got {major}.{minor}"


def _square_reasons(inputs: Inputs) -> Iterator[str]:
    if not statically_known_true(inputs.num_queries == inputs.num_keys):
        yield (
            "needs as many queries as keys for Causal on CUDA, "
            f"got {inputs.num_queries} and {inputs.num_keys}"
        )


def _dot_dim(inputs: Inputs) -> int:
    assert inputs.dot_dim is not None  # checked by `reasons`
    return inputs.dot_dim


def revive(term: Tensor) -> tuple[Tensor, Tensor]:
    """Return the term, changed so that rows that may look nowhere look everywhere, and which rows
    may look somewhere."""
    if term.dtype == torch.bool:
        alive = term.any(dim=-1, keepdim=True)
        return term | ~alive, alive
    alive = (term != -torch.inf).any(dim=-1, keepdim=True)
    return term.masked_fill(~alive, 0.0), alive
