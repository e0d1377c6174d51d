"""What tests of attention share: output with gradients, tolerances, and the largest tensor made."""

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attnkit import attend

# (atol, rtol) of torch's own tests of its kernels
TOLERANCES = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1e-5, 1.3e-6),
    torch.bfloat16: (1e-3, 1.6e-2),
    torch.float16: (1e-3, 1e-3),
}
FUDGE = 3


def compiling_is_exporting():
    """torch 2.11 says so, and then edges are not sorted in what `torch.compile` makes."""
    told = torch.compile(lambda x: x + int(torch.compiler.is_exporting()), backend="eager")
    return bool(told(torch.zeros(1)))


def with_third(first, second, third):
    """Each of the first with each of the second, and with one of the third in turn."""
    third = list(third)
    return [
        (one, other, third[(i + j) % len(third)])
        for i, one in enumerate(first)
        for j, other in enumerate(second)
    ]


def with_gradients(tensors, function=attend, **options):
    """Results and gradients, for gradients of the results that every dtype holds exactly."""
    results = function(*tensors, **options)
    results = results if isinstance(results, tuple) else (results,)
    towards = [
        ((torch.arange(result.numel(), device=result.device) % 17 - 8).view_as(result) / 8)
        for result in results
    ]
    towards = [toward.to(result.dtype) for toward, result in zip(towards, results, strict=True)]
    return [*results, *torch.autograd.grad(results, tensors, towards)]


def assert_equal(actual, exact, plain):
    """As torch tests its kernels: the error of plain code in the same dtype is allowed too."""
    atol, rtol = TOLERANCES[actual.dtype]
    atol = max(atol, (plain.double() - exact).abs().max().item())
    assert actual.isfinite().all()
    torch.testing.assert_close(actual.double(), exact, atol=FUDGE * atol, rtol=FUDGE * rtol)


class Largest(TorchDispatchMode):
    """The numbers in the largest tensor that any operator returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                self.see(tensor)
        return result

    def see(self, tensor):
        self.numel = max(self.numel, tensor.numel())
