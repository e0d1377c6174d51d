"""A search for attention in a network: for softmaxes over more than its classes, and for products
of activations with each other, as in linear attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnkit.core.running import undisturbed
from attnkit.surgery.dry_run import examples_for

SOFTMAX = "a softmax is taken"
PRODUCT = "activations are multiplied with each other"
_OPERATIONS = dict.fromkeys(("softmax", "scaled_dot_product_attention"), SOFTMAX) | dict.fromkeys(
    ("matmul", "__matmul__", "bmm", "baddbmm", "einsum"), PRODUCT
)


def attending(model: nn.Module) -> dict[str, str]:
    """Return the innermost modules that take a softmax or multiply activations in a dry run, and
    which; products only outside of modules with a softmax. Empty if no example runs."""
    for images in examples_for(model):
        inside: list[str] = []
        found: dict[str, str] = {}
        with suppress(Exception), _inside(model, inside), _Watch(inside, found):
            model(images)
            softmaxes = tuple(f"{name}." for name, what in found.items() if what == SOFTMAX)
            return {
                name: what
                for name, what in found.items()
                if what == SOFTMAX or not any(each.startswith(f"{name}.") for each in softmaxes)
            }
    return {}


@contextmanager
def _inside(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Return a context in which `names` are those of the running modules, the innermost last."""

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


class _Watch(TorchFunctionMode):
    def __init__(self, inside: list[str], found: dict[str, str]) -> None:
        super().__init__()
        self.inside = inside
        self.found = found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        what = _OPERATIONS.get(getattr(func, "__name__", ""))
        tensors = [each for each in args if isinstance(each, Tensor)]
        # weights of a product have two dimensions
        if what and len(tensors) >= 1 + (what == PRODUCT) and all(t.ndim > 2 for t in tensors):
            name = self.inside[-1]
            self.found[name] = SOFTMAX if SOFTMAX in (what, self.found.get(name)) else PRODUCT
        return func(*args, **(kwargs or {}))
