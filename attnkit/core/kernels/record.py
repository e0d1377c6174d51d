"""Which kernel really ran, per module, read from the operator that torch dispatched."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from attnkit.core.contexts import Opened, dispatch_flags_kept, uncompiled
from attnkit.core.running import TELLING, RunningModules, functions_handled

KERNEL_OF_OPERATOR = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_fused_attention_overrideable": "overrideable",
}

# The second is all of torch.nn.MultiheadAttention, which calls the first where we cannot see.
ATTENTION_FUNCTIONS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


class KernelCounts:
    """`counts[module][kernel]`: how often each kernel ran in each module.

    A module is named as in `named_modules()` of the recorded model, or of the outermost module that
    was called, so that module itself, like attention outside of any, is `""`. `str()` is a table.
    """

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.shares: dict[str, dict[str, float]] = {}
        """`shares[module][kernel]`: of a kernel that leaves out what the mask does not allow, the
        products that its last call computed, as a share of all queries × keys."""

    def add(self, module: str, kernel: str, share: float | None = None) -> None:
        self.counts.setdefault(module, Counter())[kernel] += 1
        if share is not None:
            self.shares.setdefault(module, {})[kernel] = share

    def take_back(self, module: str, kernel: str, share: float | None) -> None:
        """A call that was added has raised; `share` is what was there before it."""
        kernels, shares = self.counts[module], self.shares.get(module, {})
        kernels[kernel] -= 1
        if share is None or not kernels[kernel]:
            shares.pop(kernel, None)
        else:
            shares[kernel] = share
        if not kernels[kernel]:
            del kernels[kernel]
        for records in (self.counts, self.shares):
            if not records.get(module, True):
                del records[module]

    def total(self) -> Counter[str]:
        """How often each kernel ran in all modules together."""
        return sum(self.counts.values(), Counter())

    def __str__(self) -> str:
        if not self.counts:
            return (
                "no scaled_dot_product_attention of torch and no kernel of attnkit ran; "
                "attention that a model computes by other operators is not counted"
            )
        rows = {"module": "kernels"}
        for module, kernels in self.counts.items():
            shares = self.shares.get(module, {})
            ran = (
                f"{kernel} ×{times}"
                + (f" ({shares[kernel]:.3f} of the dense cost)" if kernel in shares else "")
                for kernel, times in kernels.items()
            )
            rows[module or "(itself)"] = ", ".join(ran)
        width = max(map(len, rows))
        lines = [f"{module:<{width}}  {ran}" for module, ran in rows.items()]
        return "\n".join(lines)


@contextmanager
def record_backends(model: nn.Module | None = None) -> Iterator[KernelCounts]:
    """Count the attention kernels that each module runs inside the `with` block.

        with attnkit.record_backends() as record:
            model(images)
        print(record)

    Every call of torch's `scaled_dot_product_attention` is seen, also in modules of other
    libraries. The kernel is the operator that torch dispatched, or `math` if it dispatched no fused
    one. `torch.nn.MultiheadAttention` does not use its fast path for evaluation, a single operator,
    while it is watched. Modules compiled with torch.compile run uncompiled inside the block, since
    torch cannot observe operators in compiled code; the choice of kernel is the same Python either
    way. Other threads take part where they run in this context, as `asyncio.to_thread` does.

    Args:
        model: the names of modules come from its `named_modules()`; None: the outermost module that
            is called.
    """
    record = KernelCounts()
    recorder = _Recorder(record, model)
    with ExitStack() as stack:
        stack.enter_context(_RECORDERS.opened(recorder))
        stack.enter_context(uncompiled())
        stack.enter_context(recorder.running.followed())
        stack.enter_context(functions_handled(recorder.call))
        yield record


def note_kernel(kernel: str, share: Callable[[], float | None] | None = None) -> None:
    """Report to open records that a kernel of attnkit runs, which is no operator of torch, and what
    share of queries × keys it computes."""
    # while a graph is traced nothing runs, and reading the list would make the graph depend on it
    if not torch.compiler.is_compiling():
        for recorder in _RECORDERS.get():
            recorder.add(kernel, None if share is None else share())


def unrecorded() -> AbstractContextManager[object]:
    """In the block no open record counts: of a pass that is made only to look at a model."""
    return _PAUSED.opened(_RECORDERS.get())


class _Recorder:
    """Counts where the modules that run are."""

    def __init__(self, record: KernelCounts, model: nn.Module | None) -> None:
        self.record = record
        self.running = RunningModules(model)

    def add(self, kernel: str, share: float | None = None) -> None:
        if any(self in paused for paused in _PAUSED.get()):
            return
        module = self.running.innermost()
        before = self.record.shares.get(module, {}).get(kernel)

        def ended(has_raised: bool) -> None:
            if has_raised:
                self.record.take_back(module, kernel, before)

        with TELLING:
            self.record.add(module, kernel, share)
            self.running.told(ended)

    def call(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """A function of torch; its attention is counted."""
        if func not in ATTENTION_FUNCTIONS:
            return func(*args, **kwargs)
        operators: list[str] = []
        # It is counted once, also where a tap looks into it. Operators are observed in this call
        # alone: what else is computed must not depend on whether it is recorded, and what quicker
        # operators replace is not replaced where operators are observed.
        with (
            _PAUSED.opened((self,)),
            _OPERATORS.opened(operators),
            dispatch_flags_kept(),
            _OperatorMode(),
        ):
            output = func(*args, **kwargs)
        # the math kernel is a composition of ordinary operators and has no operator of its own
        self.add(operators[-1] if operators else "math")
        return output


_RECORDERS: Opened[_Recorder] = Opened("records of kernels")
_PAUSED: Opened[tuple[_Recorder, ...]] = Opened("paused records")
_OPERATORS: Opened[list[str]] = Opened("operators of calls")
"""Of the calls of torch's attention that are running, which kernels they were dispatched to."""


class _OperatorMode(TorchDispatchMode):
    """Sees which operator a call was dispatched to. It holds nothing, as `_FunctionMode`."""

    supports_higher_order_operators = True  # such as flex_attention, which are let through

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            # in inference mode the call arrives whole: take it apart where we can see
            with self:
                return func.decompose(*args, **kwargs)
        if func.name() in KERNEL_OF_OPERATOR:
            for operators in _OPERATORS.get():
                operators.append(KERNEL_OF_OPERATOR[func.name()])
        return func(*args, **kwargs)
