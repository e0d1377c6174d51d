"""CUDA without a GPU: tensors of the device meta, which have no memory, say that they are CUDA's.

What attnkit asks and computes on the way to a kernel is then what it would be on a GPU of compute
capability 9.0, forward and backward. torch's fused kernels are called by their operators, whose
shapes and derivatives torch knows without a GPU, and the arguments are held to what the kernels
take. FakeTensorMode's own CUDA tensors have no backward where there is no GPU.

- A number that is read (`item`, `tolist`, `bool`), `nonzero`, and what goes from the GPU to the CPU
  raise an error, as these tensors hold nothing to read: each is a place where a GPU is waited for.
- An operator of tensors on both raises an error; `Transfers.count` counts those that go to the GPU.
"""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attnkit.core.kernels import flex, sdpa

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten


class AsCuda(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.kernel = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__:
            device = func(*args)
            return CUDA if device.type == "meta" else device
        if func == torch.Tensor.is_cuda.__get__:
            return args[0].is_meta
        if func is F.scaled_dot_product_attention:
            return fused(self.kernel, *args, **kwargs)
        args, kwargs = pytree.tree_map(without_memory, (args, kwargs))
        return func(*args, **kwargs)


def without_memory(argument):
    is_cuda = (isinstance(argument, torch.device) and argument.type == "cuda") or (
        isinstance(argument, str) and argument.startswith("cuda")
    )
    return torch.device("meta") if is_cuda else argument


class Transfers(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if hasattr(leaf, "is_meta")]
        result = func(*args, **(kwargs or {}))
        if len({tensor.is_meta for tensor in given if tensor.ndim}) > 1:
            assert func.overloadpacket is aten.copy_, f"{func}: tensors on CPU and on CUDA"
        results = pytree.tree_leaves(result)
        if any(getattr(leaf, "is_meta", False) for leaf in results):
            self.count += any(not tensor.is_meta and tensor.ndim for tensor in given)
        return result


def fused(
    kernel, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False,
):  # fmt: skip
    """`scaled_dot_product_attention` by the kernel, whose arguments are checked."""
    tensors = query, key, value
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    trains = torch.is_grad_enabled() and any(
        t.requires_grad for t in (*tensors, attn_mask) if t is not None
    )
    assert not (is_causal and attn_mask is not None)
    assert len({t.dtype for t in tensors}) == len({t.shape[0] for t in tensors}) == 1
    grouped = query.shape[1] != key.shape[1]
    assert grouped <= enable_gqa
    if kernel == SDPBackend.MATH:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return aten._scaled_dot_product_attention_math(
            *tensors, attn_mask, dropout_p, is_causal, **options
        )[0]
    assert scale is None or scale > 0
    assert all(tensor.stride(-1) == 1 for tensor in tensors)
    assert all(0 not in tensor.shape for tensor in tensors)
    largest = max(tensor.shape[3] for tensor in tensors)
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, 1) if grouped else t for t in (key, value))
    if kernel == SDPBackend.FLASH_ATTENTION:
        assert is_half
        assert attn_mask is None
        assert largest == query.shape[3] == value.shape[3] <= 256
        assert not is_causal or query.shape[2] == key.shape[2]
        operator = aten._scaled_dot_product_flash_attention
        return operator(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    assert query.shape[3] % 8 == value.shape[3] % 8 == 0
    term = None
    if attn_mask is not None:
        term = attn_mask.expand(*query.shape[:3], key.shape[2])
    arguments = (query, key, value, term, trains, dropout_p, is_causal)
    if kernel == SDPBackend.CUDNN_ATTENTION:
        assert is_half
        assert largest <= 128
        assert term is None or not term.requires_grad
        assert min(query.shape[2], key.shape[2]) > 1
        return aten._scaled_dot_product_cudnn_attention(*arguments, False, scale=scale)[0]
    assert kernel == SDPBackend.EFFICIENT_ATTENTION
    assert not grouped
    if term is not None and term.dtype == torch.bool:
        term = torch.zeros_like(term, dtype=query.dtype).masked_fill(~term, -torch.inf)
        arguments = (*arguments[:3], term, *arguments[4:])
    return aten._scaled_dot_product_efficient_attention(*arguments, scale=scale)[0]


def flex_attention(query, key, value, options):
    """What FlexAttention computes, with every score in memory: it cannot be compiled here."""
    mask = options["block_mask"]
    assert mask.seq_lengths == (query.shape[2], key.shape[2])
    assert all(t.shape[3] >= 16 and t.shape[3] % 8 == 0 for t in (query, key, value))
    where = (torch.arange(size, device=query.device) for size in (*query.shape[:3], key.shape[2]))
    batch, head, row, column = torch.meshgrid(*where, indexing="ij")
    allowed = mask.mask_mod(batch, head, row, column)
    grouped = {"scale": options["scale"], "enable_gqa": options["enable_gqa"]}
    output = fused(SDPBackend.MATH, query, key, value, allowed, **grouped)
    if "return_aux" not in options:
        return output
    assert options["return_aux"].lse
    return output, SimpleNamespace(lse=output.float().logsumexp(-1))


@contextmanager
def cuda_without_a_gpu():
    """Within it `device="cuda"` works; gives what counts transfers to the GPU."""
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)))
        enter(patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        enter(patch.object(flex, "_compiled", lambda kinds: flex_attention))
        as_cuda = AsCuda()

        @contextmanager
        def forced(backend, query):
            as_cuda.kernel = backend.kernel
            yield

        for backend in (sdpa.Sdpa, sdpa.Flash):
            enter(patch.object(backend, "forced", forced))
        enter(as_cuda)
        yield enter(Transfers())
