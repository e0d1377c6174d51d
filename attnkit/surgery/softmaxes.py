"""Where a network takes a softmax over more than its classes, which is where it may attend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnkit.core.watch.undisturbed import undisturbed
from attnkit.surgery.dry_run import examples_for

FUNCTIONS = {"softmax", "scaled_dot_product_attention"}


def softmaxes(model: nn.Module) -> list[str]:
    """The innermost modules in which one is taken in a dry run, in order; none if the network runs
    on no example that is made up for it."""
    for images in examples_for(model):
        inside: list[str] = []
        found: dict[str, None] = {}
        with suppress(Exception), _inside(model, inside), _Softmaxes(inside, found):
            model(images)
            return list(found)
    return []


@contextmanager
def _inside(model: nn.Module, names: list[str]) -> Iterator[None]:
    """In the block `names` are those of the modules that are running, the innermost last."""

    def drop_last() -> None:  # a hook that returned something would change the output
        names.pop()

    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        for name, module in model.named_modules():
            enter = module.register_forward_pre_hook(lambda *_, name=name: names.append(name))
            leave = module.register_forward_hook(lambda *_: drop_last(), always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        yield


class _Softmaxes(TorchFunctionMode):
    def __init__(self, inside: list[str], found: dict[str, None]) -> None:
        super().__init__()
        self.inside = inside
        self.found = found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_softmax = getattr(func, "__name__", "") in FUNCTIONS
        if is_softmax and args and isinstance(args[0], Tensor) and args[0].ndim > 2:
            self.found[self.inside[-1]] = None
        return func(*args, **(kwargs or {}))
