"""A record of the inputs and outputs of a model's modules."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnkit.core.running import module_name


@dataclass(eq=False)
class ModuleRun:
    """One run of a module.

    name: name as in `named_modules()`, also if compiled.
    given: the tensors among the arguments.
    around: the enclosing run of another module.
    has_gradients: whether gradients were enabled at its start.
    output: the return value; None until then.
    made: the tensors in the output.
    """

    name: str
    module: nn.Module
    given: list[Tensor]
    around: "ModuleRun | None"
    has_gradients: bool
    output: Any = None
    made: list[Tensor] = field(default_factory=list)

    def path(self) -> "Iterator[ModuleRun]":
        """Yield this run and the runs that enclose it, the innermost first."""
        run: ModuleRun | None = self
        while run is not None:
            yield run
            run = run.around


class Enough(Exception):
    """Raised to stop a model that has run far enough."""


@contextmanager
def module_runs(
    model: nn.Module, is_kept: Callable[[ModuleRun], bool] = lambda run: True
) -> Iterator[list[ModuleRun]]:
    """Record the runs of modules in the block, in the order in which they end.

    Runs with `is_kept(run)` are recorded. `is_kept` is called when a module ends, and may raise
    `Enough` to stop the model.
    """
    runs: list[ModuleRun] = []
    open_runs: list[ModuleRun] = []
    names = {module: module_name(name) for name, module in model.named_modules()}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = _tensors([*args, *kwargs.values()])
        around = open_runs[-1] if open_runs else None
        open_runs.append(ModuleRun(names[module], module, given, around, torch.is_grad_enabled()))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        run = open_runs.pop()
        while run.module is not module:  # a module that raised an error, which its caller caught
            run = open_runs.pop()
        run.output, run.made = output, _tensors(output)
        if is_kept(run):
            runs.append(run)

    with ExitStack() as stack:
        for module in names:
            before = module.register_forward_pre_hook(enter, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield runs


def _tensors(several: Any) -> list[Tensor]:
    """Return a tensor, or the tensors in a list, a tuple or the values of a mapping, as a list."""
    if isinstance(several, Mapping):
        several = list(several.values())
    if not isinstance(several, list | tuple):
        several = [several]
    return [each for each in several if isinstance(each, Tensor)]
