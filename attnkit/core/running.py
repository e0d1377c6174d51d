"""Running a module to learn something about it, and leaving it as it was: which modules run, and
which functions of torch and of transformers' attention interface they call."""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from threading import RLock, local
from types import MappingProxyType
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.module import (
    _global_forward_hooks,
    _global_forward_pre_hooks,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from attnkit.core.contexts import Opened, shared

Item = TypeVar("Item")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In the block the module and all in it are in evaluation mode, afterwards as before."""
    modes = [(child, child.training) for child in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for child, mode in modes:
            child.training = mode


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """In the block the module is in evaluation and nothing has gradients; after it modes, buffers
    and torch's random numbers are as before, also if the block raised.

    Buffers are put back because some modules write them in evaluation too, and the random state
    because a module may draw whatever its mode is.
    """
    restore_buffers = buffers_of(module)
    tensors = (*module.parameters(), *module.buffers())
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), evaluating(module):
            yield
    finally:
        restore_buffers()


def buffers_of(module: nn.Module) -> Callable[[], None]:
    """A function that puts the buffers back as they are now, as often as it is called."""
    buffers = [
        (child, name, buffer, None if buffer is None else buffer.detach().clone())
        for child in module.modules()
        for name, buffer in child._buffers.items()
    ]

    @torch.no_grad()
    def restore() -> None:
        for child, name, buffer, value in buffers:
            child._buffers[name] = buffer
            if buffer is not None and value is not None and buffer.layout is torch.strided:
                with torch.inference_mode(buffer.is_inference()):
                    buffer.copy_(value)

    return restore


def module_name(name: str) -> str:
    """A name of `named_modules()` as it was before torch.compile wrapped the model."""
    return name.removeprefix("_orig_mod").removeprefix(".")


def others_follow() -> bool:
    """Whether hooks of all modules are registered that are not those of `RunningModules`."""
    hooks = (*_global_forward_hooks.values(), *_global_forward_pre_hooks.values())
    return any(hook not in (_enter, _leave) for hook in hooks)


class RunningModules:
    """The modules whose forward is running, outermost first, named as in `named_modules()` of the
    model; of the outermost that was called, if there is none.

    What is told by `told` while an outermost module runs is taken back if that module raises; what
    other threads tell meanwhile stays.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.names: dict[nn.Module, str] = {}
        self._num_around = 0
        if model is not None:
            self._name_modules_of(model)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """In the block modules are seen to enter and leave."""
        self._num_around = len(_stack.get())
        with _FOLLOWING.opened(self), shared("hooks of all modules", _hooks):
            try:
                yield
            finally:
                _stack.set(_stack.get()[: self._num_around])
                self._set_call(None)

    @property
    def is_followed(self) -> bool:
        """Whether what runs now runs inside the block."""
        return self in _FOLLOWING.get()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return _stack.get()[self._num_around :]

    def innermost(self) -> str:
        """The name of the innermost; "" where none runs, or it has none."""
        modules = self.modules
        return self.names.get(modules[-1], "") if modules else ""

    def innermost_of_model(self) -> str | None:
        """The name of the innermost that has one; "" where none runs; None where only others do."""
        modules = self.modules
        named = (self.names[module] for module in reversed(modules) if module in self.names)
        return next(named, None if modules else "")

    def enter(self, module: nn.Module) -> None:
        """A module begins to run."""
        if not self.modules:
            self._name_modules_of(module if self.model is None else self.model)
            self.begin()

    def leave(self, output: object) -> None:
        """It has ended, with None where it raised."""
        if not self.modules:
            call = _calls.get().get(self)
            if call is not None:
                self.end(has_raised=output is None and sys.exc_info()[1] is not call.handled)

    def begin(self) -> None:
        """What is told from now on is of a call that may raise."""
        self._set_call(_Call(_calls.get().get(self), sys.exc_info()[1]))

    def end(self, *, has_raised: bool) -> None:
        """The call has ended."""
        call = _calls.get()[self]
        self._set_call(call.around)
        if call.around is not None and not has_raised:
            call.around.told += call.told
            return
        with TELLING:
            for ended in reversed(call.told):
                ended(has_raised)

    def told(self, ended: Callable[[bool], None]) -> None:
        """Something was told; `ended` is called with whether the call that told it has raised."""
        call = _calls.get().get(self)
        if call is None:
            ended(False)
        else:
            call.told.append(ended)

    def keep(self, kept: dict[str, list[Item]], name: str, item: Item) -> None:
        """Add it to the list of this name, unless the call raises."""

        def ended(has_raised: bool) -> None:
            if has_raised and not kept.get(name, True):
                del kept[name]

        with TELLING:
            self.told(ended)
            self.append(kept.setdefault(name, []), item)

    def append(self, items: list[Item], item: Item) -> None:
        """Add it to a list, unless the call raises."""

        def ended(has_raised: bool) -> None:
            if has_raised:
                items[:] = [other for other in items if other is not item]

        with TELLING:
            items.append(item)
            self.told(ended)

    def _set_call(self, call: "_Call | None") -> None:
        others = {running: other for running, other in _calls.get().items() if running is not self}
        _calls.set(others if call is None else others | {self: call})

    def _name_modules_of(self, model: nn.Module) -> None:
        self.names = {child: module_name(name) for name, child in model.named_modules()}


@dataclass(eq=False)
class _Call:
    """Of an outermost module, or of what `undone_on_error` is around."""

    around: "_Call | None"
    handled: BaseException | None
    """What the caller is handling."""
    told: list[Callable[[bool], None]] = field(default_factory=list)


_calls: ContextVar[Mapping[RunningModules, _Call]] = ContextVar(
    "calls that may raise", default=MappingProxyType({})
)
TELLING = RLock()
"""Held where threads tell something and take it back."""

_FOLLOWING: Opened[RunningModules] = Opened("running modules")
_stack: ContextVar[tuple[nn.Module, ...]] = ContextVar("stack of modules", default=())


@contextmanager
def _hooks() -> Iterator[None]:
    with ExitStack() as stack:
        for hook in (
            register_module_forward_pre_hook(_enter),
            register_module_forward_hook(_leave, always_call=True),
        ):
            stack.callback(hook.remove)
        yield


def _enter(module: nn.Module, args: object) -> None:
    following = _FOLLOWING.get()
    for running in following:
        running.enter(module)
    if following:
        _stack.set((*_stack.get(), module))
    _local.thread.enter(module)


def _leave(module: nn.Module, args: object, output: object) -> None:
    stack = _stack.get()
    if stack and stack[-1] is module:
        _stack.set(stack[:-1])
        for running in _FOLLOWING.get():
            running.leave(output)
    _local.thread.leave(module, has_raised=output is None and sys.exc_info()[1] is not None)


Handler = Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]
"""What runs in the place of a function of torch, of (function, args, kwargs)."""

_handlers: Opened[Handler] = Opened("functions of torch")


@contextmanager
def functions_handled(handler: Handler) -> Iterator[None]:
    """In the block functions of torch are given to `handler`; those that it calls, to the handler
    of the next block around this.

    torch keeps modes for each thread. A thread that was started with this context, as
    `asyncio.to_thread` does, opens them when a module begins to run there.
    """
    thread = _local.thread
    with (
        thread.inherited(),
        _handlers.opened(handler),
        shared("hooks of all modules", _hooks),
        _FunctionMode(),
    ):
        thread.num_blocks += 1
        try:
            yield
        finally:
            thread.num_blocks -= 1


class _FunctionMode(TorchFunctionMode):
    """The handler of the innermost block.

    torch keeps the open modes of a thread, in which several tasks of asyncio may be inside their
    blocks. A mode here holds nothing, so that it does not matter whose is on top.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        variable = _handlers.variable
        blocks = [block for block in variable.get() if block.is_running]
        if not blocks:
            return func(*args, **(kwargs or {}))
        before = variable.set(tuple(blocks[:-1]))
        try:
            return blocks[-1].item(func, args, kwargs or {})
        finally:
            variable.reset(before)


class _Thread:
    """The modes of a thread for the blocks that others have opened, and the modules that run while
    they are open."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.modules: list[nn.Module] = []
        self.modes = ExitStack()
        self.hooks = ExitStack()

    def enter(self, module: nn.Module) -> None:
        """A module begins to run here."""
        if not self.modules:
            if self.num_blocks or not _handlers.get():
                return
            # until it has ended, which its block may not wait for
            self.hooks.enter_context(shared("hooks of all modules", _hooks))
            self.modes.enter_context(self.inherited())
        self.modules.append(module)

    def leave(self, module: nn.Module, has_raised: bool) -> None:
        """It has ended."""
        if not has_raised:
            with suppress(IndexError):  # of the empty deque
                while True:
                    _unused_hooks.popleft().close()
        if module not in self.modules:
            return
        while self.modules.pop() is not module:  # those that raised what torch lets through
            pass
        if not self.modules:
            self.modes.close()
            hooks = self.hooks.pop_all()
            if has_raised:  # torch is going through the hooks, of which none may go
                _unused_hooks.append(hooks)
            else:
                hooks.close()

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """In the block there is a mode for each handler that came with the context."""
        with ExitStack() as stack:
            for _ in () if self.num_blocks or self.modules else _handlers.get():
                stack.enter_context(_FunctionMode())
            yield


_unused_hooks: deque[ExitStack] = deque()
"""Of modules that raised; they go when the next module ends."""


class _Local(local):
    def __init__(self) -> None:
        self.thread = _Thread()


_local = _Local()


@contextmanager
def undone_on_error(*objects: object) -> Iterator[None]:
    """In the block; if it raises, the attributes of these objects are as they were before, and
    nothing of it is left in the records of those that follow modules."""
    before = [dict(vars(each)) for each in objects]
    following = _FOLLOWING.get()
    for running in following:
        running.begin()
    has_raised = True
    try:
        yield
        has_raised = False
    finally:
        if has_raised:
            for each, attributes in zip(objects, before, strict=True):
                vars(each).update(attributes)
        for running in following:
            running.end(has_raised=has_raised)


InterfaceHandler = Callable[..., tuple]
"""What runs in the place of a function of transformers, of (its name, the function, its
arguments)."""

_interface_handlers: Opened[InterfaceHandler] = Opened("transformers' interface")


@contextmanager
def interface_handled(handler: InterfaceHandler) -> Iterator[None]:
    """In the block functions of transformers' attention interface are given to `handler`; those
    that it calls, to the handler of the next block around this.

    Models of transformers ask `AttentionInterface` for the function that their configuration names.
    Nothing of transformers is imported.
    """
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    chosen = getattr(interface, "get_interface", None)
    if interface is None or chosen is None:
        yield
        return

    def get_interface(self: Any, name: str, default: Callable) -> Callable:
        return partial(_interface_call, name, chosen(self, name, default))

    with (
        _interface_handlers.opened(handler),
        shared(interface, lambda: patch.object(interface, "get_interface", get_interface)),
    ):
        yield


def _interface_call(name: str, function: Callable[..., tuple], *args: Any, **options: Any) -> tuple:
    for handler in _interface_handlers.get():
        function = partial(handler, name, function)
    return function(*args, **options)
