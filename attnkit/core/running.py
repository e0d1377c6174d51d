"""Which modules of a model are running."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    _global_forward_hooks,
    _global_forward_pre_hooks,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


def module_name(name: str) -> str:
    """A name of `named_modules()` as it was before torch.compile wrapped the model."""
    return name.removeprefix("_orig_mod").removeprefix(".")


def others_follow() -> bool:
    """Whether hooks of all modules are registered that are not those of `RunningModules`."""
    hooks: tuple[Any, ...] = *_global_forward_hooks.values(), *_global_forward_pre_hooks.values()
    return any(not isinstance(getattr(h, "__self__", None), RunningModules) for h in hooks)


class RunningModules:
    """The modules whose forward is running, outermost first, named as in `named_modules()` of the
    model; of the outermost that was called, if there is none."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.modules: list[nn.Module] = []
        self.names: dict[nn.Module, str] = {}
        if model is not None:
            self._name_modules_of(model)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """In the block modules are seen to enter and leave."""
        with ExitStack() as stack:
            for hook in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ):
                stack.callback(hook.remove)
            yield

    def innermost(self) -> str:
        """The name of the innermost; "" where none runs, or it has none."""
        return self.names.get(self.modules[-1], "") if self.modules else ""

    def innermost_of_model(self) -> str | None:
        """The name of the innermost that has one; "" where none runs; None where only others do."""
        named = (self.names[module] for module in reversed(self.modules) if module in self.names)
        return next(named, None if self.modules else "")

    def _name_modules_of(self, model: nn.Module) -> None:
        self.names = {child: module_name(name) for name, child in model.named_modules()}

    def _enter(self, module: nn.Module, args: object) -> None:
        if not self.modules:
            self._name_modules_of(module if self.model is None else self.model)
        self.modules.append(module)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if self.modules and self.modules[-1] is module:
            self.modules.pop()
