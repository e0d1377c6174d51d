"""Which modules of a model are running."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from attnkit.core.contexts import Opened, shared


def module_name(name: str) -> str:
    """A name of `named_modules()` as it was before torch.compile wrapped the model."""
    return name.removeprefix("_orig_mod").removeprefix(".")


class RunningModules:
    """The modules whose forward is running, outermost first, named as in `named_modules()` of the
    model; of the outermost that was called, if there is none."""

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

    def _name_modules_of(self, model: nn.Module) -> None:
        self.names = {child: module_name(name) for name, child in model.named_modules()}


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


def _leave(module: nn.Module, args: object, output: object) -> None:
    stack = _stack.get()
    if stack and stack[-1] is module:
        _stack.set(stack[:-1])
