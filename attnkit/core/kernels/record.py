"""A record of the kernels that ran in each module, read from the operators that torch
dispatched."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from attnkit.core.contexts import Opened, dispatch_flags_kept, uncompiled
from attnkit.core.running import RunningModules, functions_handled

KERNEL_OF_OPERATOR = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_fused_attention_overrideable": "overrideable",
}

# The second is the whole of torch.nn.MultiheadAttention, whose call of the first is not observable.
ATTENTION_FUNCTIONS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


class KernelCounts:
    """`counts[module][kernel]`, how often each kernel ran in each module; `str()` is a table.

    A module is named as in `named_modules()` of the recorded model, or of the outermost module that
    was called. The name of that module itself, and of attention outside of any module, is `""`.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, float | None]] = []
        """The module, the kernel and its share of queries × keys of each call, in order."""

    @property
    def counts(self) -> dict[str, Counter[str]]:
        """How often each kernel ran in each module."""
        counts: dict[str, Counter[str]] = {}
        for module, kernel, _ in self.calls:
            counts.setdefault(module, Counter())[kernel] += 1
        return counts

    @property
    def shares(self) -> dict[str, dict[str, float]]:
        """`shares[module][kernel]`: the share of queries × keys that the kernel's last call
        computed, for kernels that skip what the mask does not allow."""
        shares: dict[str, dict[str, float]] = {}
        for module, kernel, share in self.calls:
            if share is not None:
                shares.setdefault(module, {})[kernel] = share
        return shares

    def total(self) -> Counter[str]:
        """Return how often each kernel ran in all modules together."""
        return Counter(kernel for _, kernel, _ in self.calls)

    def __str__(self) -> str:
        if not self.calls:
            return (
                "no scaled_dot_product_attention of torch and no kernel of attnkit ran; "
                "attention that a model computes by other operators is not counted"
            )
        rows, all_shares = {"module": "kernels"}, self.shares
        for module, kernels in self.counts.items():
            shares = all_shares.get(module, {})
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

    Every call of torch's `scaled_dot_product_attention` is counted, also in modules of other
    libraries. The kernel is the operator that torch dispatched, or `math` if it dispatched no fused
    one. `torch.nn.MultiheadAttention` does not use its fast path for evaluation, a single operator,
    while it is observed. Modules compiled with torch.compile run uncompiled inside the block, since
    torch cannot observe operators in compiled code; the same Python code chooses the kernel either
    way. Other threads are recorded if they run in this context, as `asyncio.to_thread` does.

    Args:
        model: the model whose `named_modules()` gives the names; None: the outermost module that is
            called.
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
    """Report to open records that a kernel of attnkit, which is no operator of torch, has run, and
    the share of queries × keys that it computed."""
    # nothing runs while a graph is traced, and reading the list would make the graph depend on it
    if not torch.compiler.is_compiling():
        for recorder in _RECORDERS.get():
            recorder.add(kernel, None if share is None else share())


def unrecorded() -> AbstractContextManager[object]:
    """Suspend the open records in the block; for a pass that only inspects a model."""
    return _PAUSED.opened(_RECORDERS.get())


class _Recorder:
    """Adds kernels to a record under the name of the running module."""

    def __init__(self, record: KernelCounts, model: nn.Module | None) -> None:
        self.record = record
        self.running = RunningModules(model)

    def add(self, kernel: str, share: float | None = None) -> None:
        if any(self in paused for paused in _PAUSED.get()):
            return
        self.running.append(self.record.calls, (self.running.innermost(), kernel, share))

    def call(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function of torch; count it if it computes attention."""
        if func not in ATTENTION_FUNCTIONS:
            return func(*args, **kwargs)
        operators: list[str] = []
        # The record is paused, so that the call is counted once even if a tap looks into it.
        # Operators are observed during this call only: faster operators are not used where
        # operators are observed, and the rest of the model must not depend on the record.
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
"""For each running call of torch's attention the list of kernels that it was dispatched to."""


class _OperatorMode(TorchDispatchMode):
    """Observes the operator that a call was dispatched to. Like `_FunctionMode` it has no state."""

    supports_higher_order_operators = True  # such as flex_attention, which pass unobserved

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            # in inference mode the call arrives undivided; its parts are dispatched to this mode
            with self:
                return func.decompose(*args, **kwargs)
        if func.name() in KERNEL_OF_OPERATOR:
            for operators in _OPERATORS.get():
                operators.append(KERNEL_OF_OPERATOR[func.name()])
        return func(*args, **kwargs)
