"""Tools to run a module and leave it unchanged, and to observe which modules run and which
functions of torch and of transformers' attention interface they call."""

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
    """Put the module and its submodules in evaluation mode in the block, then restore the modes."""
    modes = [(child, child.training) for child in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for child, mode in modes:
            child.training = mode


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Put the module in evaluation mode without gradients for the block; restore modes, buffers and
    torch's random state afterwards, also if the block raises.

    Buffers are restored because some modules write them in evaluation, too, and the random state
    because a module may draw random numbers in any mode.
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
    """Return a function that restores the present buffers; it may be called several times."""
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
    """Return the name that a module of `named_modules()` had before torch.compile wrapped it."""
    return name.removeprefix("_orig_mod").removeprefix(".")


def others_follow() -> bool:
    """Return whether global module hooks other than those of this file are registered."""
    hooks = (*_global_forward_hooks.values(), *_global_forward_pre_hooks.values())
    return any(hook not in (_enter, _leave) for hook in hooks)


class RunningModules:
    """The modules whose forward is running, outermost first, named as in `named_modules()` of the
    model, or of the outermost module that was called if `model` is None.

    Records made while an outermost module runs are removed if that module raises; see `on_end`.
    Records of other threads stay.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.names: dict[nn.Module, str] = {}
        self._num_around = 0
        if model is not None:
            self._name_modules_of(model)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Observe in the block which modules enter and leave their forward."""
        self._num_around = len(_stack.get())
        with _FOLLOWING.opened(self), shared("hooks of all modules", _hooks):
            try:
                yield
            finally:
                _stack.set(_stack.get()[: self._num_around])
                self._set_call(None)

    @property
    def is_followed(self) -> bool:
        """Whether the running code is inside the block of `followed`."""
        return self in _FOLLOWING.get()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return _stack.get()[self._num_around :]

    def innermost(self) -> str:
        """Return the name of the innermost module; "" if none runs or it has no name."""
        modules = self.modules
        return self.names.get(modules[-1], "") if modules else ""

    def innermost_of_model(self) -> str | None:
        """Return the name of the innermost module that has one; "" if no module runs, None if only
        modules without a name do."""
        modules = self.modules
        named = (self.names[module] for module in reversed(modules) if module in self.names)
        return next(named, None if modules else "")

    def enter(self, module: nn.Module) -> None:
        """Note that a module begins to run."""
        if not self.modules:
            self._name_modules_of(module if self.model is None else self.model)
            self.begin()

    def leave(self, output: object) -> None:
        """Note that a module has ended; the output is None if it raised."""
        if not self.modules:
            call = _calls.get().get(self)
            if call is not None:
                self.end(has_raised=output is None and sys.exc_info()[1] is not call.handled)

    def begin(self) -> None:
        """Begin a call: records made from now on are removed if it raises."""
        self._set_call(_Call(_calls.get().get(self), sys.exc_info()[1]))

    def end(self, *, has_raised: bool) -> None:
        """End the call that `begin` began."""
        call = _calls.get()[self]
        self._set_call(call.around)
        if call.around is not None and not has_raised:
            call.around.callbacks += call.callbacks
            return
        with RECORDING:
            for ended in reversed(call.callbacks):
                ended(has_raised)

    def on_end(self, ended: Callable[[bool], None]) -> None:
        """Call `ended(has_raised)` when the running call ends; at once if no call runs."""
        call = _calls.get().get(self)
        if call is None:
            ended(False)
        else:
            call.callbacks.append(ended)

    def keep(self, kept: dict[str, list[Item]], name: str, item: Item) -> None:
        """Add an item to the list `kept[name]`; remove it again if the call raises."""

        def ended(has_raised: bool) -> None:
            if has_raised and not kept.get(name, True):
                del kept[name]

        with RECORDING:
            self.on_end(ended)
            self.append(kept.setdefault(name, []), item)

    def append(self, items: list[Item], item: Item) -> None:
        """Append an item to the list; remove it again if the call raises."""

        def ended(has_raised: bool) -> None:
            if has_raised:
                items[:] = [other for other in items if other is not item]

        with RECORDING:
            items.append(item)
            self.on_end(ended)

    def _set_call(self, call: "_Call | None") -> None:
        others = {running: other for running, other in _calls.get().items() if running is not self}
        _calls.set(others if call is None else others | {self: call})

    def _name_modules_of(self, model: nn.Module) -> None:
        self.names = {child: module_name(name) for name, child in model.named_modules()}


@dataclass(eq=False)
class _Call:
    """A call of an outermost module, or a block of `undone_on_error`."""

    around: "_Call | None"
    handled: BaseException | None
    """The exception that the caller is handling."""
    callbacks: list[Callable[[bool], None]] = field(default_factory=list)


_calls: ContextVar[Mapping[RunningModules, _Call]] = ContextVar(
    "calls that may raise", default=MappingProxyType({})
)
RECORDING = RLock()
"""The lock that is held while threads add records and remove them."""

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
"""A function that is called as (function, args, kwargs) in the place of a function of torch."""

_handlers: Opened[Handler] = Opened("functions of torch")


@contextmanager
def functions_handled(handler: Handler) -> Iterator[None]:
    """Pass calls of torch's functions to `handler` in the block. Functions that the handler calls
    go to the handler of the next block around this.

    torch keeps modes per thread. A thread that runs in this context, as `asyncio.to_thread` starts
    it, opens them when a module begins to run there.
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
    """Calls the handler of the innermost block.

    torch keeps one stack of modes per thread, but several asyncio tasks of the thread may be inside
    their blocks. A mode here has no state, so that the order of the stack does not matter.
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
    """The modes that a thread has opened for blocks of other threads, and the modules that run
    while they are open."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.modules: list[nn.Module] = []
        self.modes = ExitStack()
        self.hooks = ExitStack()

    def enter(self, module: nn.Module) -> None:
        """Note that a module begins to run in this thread."""
        if not self.modules:
            if self.num_blocks or not _handlers.get():
                return
            # kept until the module has ended; the block may end before
            self.hooks.enter_context(shared("hooks of all modules", _hooks))
            self.modes.enter_context(self.inherited())
        self.modules.append(module)

    def leave(self, module: nn.Module, has_raised: bool) -> None:
        """Note that a module has ended in this thread."""
        if not has_raised:
            with suppress(IndexError):  # raised by the empty deque
                while True:
                    _unused_hooks.popleft().close()
        if module not in self.modules:
            return
        while self.modules.pop() is not module:  # torch runs no hooks after some exceptions
            pass
        if not self.modules:
            self.modes.close()
            hooks = self.hooks.pop_all()
            if has_raised:  # torch is iterating over the hooks, so none may be removed now
                _unused_hooks.append(hooks)
            else:
                hooks.close()

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """Open in the block a mode for each handler that this thread's context has."""
        with ExitStack() as stack:
            for _ in () if self.num_blocks or self.modules else _handlers.get():
                stack.enter_context(_FunctionMode())
            yield


_unused_hooks: deque[ExitStack] = deque()
"""Hooks of modules that raised, to be removed when the next module ends."""


class _Local(local):
    def __init__(self) -> None:
        self.thread = _Thread()


_local = _Local()


@contextmanager
def undone_on_error(*objects: object) -> Iterator[None]:
    """Restore the attributes of these objects if the block raises, and remove what `RunningModules`
    recorded in it."""
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
"""A function that is called as (name, function, *arguments) in the place of a function of
transformers."""

_interface_handlers: Opened[InterfaceHandler] = Opened("transformers' interface")


@contextmanager
def interface_handled(handler: InterfaceHandler) -> Iterator[None]:
    """Pass calls of transformers' attention functions to `handler` in the block. Functions that the
    handler calls go to the handler of the next block around this.

    Models of transformers get the function that their configuration names from
    `AttentionInterface`. Nothing of transformers is imported.
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
