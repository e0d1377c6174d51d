"""The base class of gates over feature maps, and the capture of their maps."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from attnkit.core.arguments import at_least
from attnkit.core.contexts import Opened, shared, uncompiled
from attnkit.core.running import RunningModules, module_name
from attnkit.layers.maps.residual import check_features


class Gate(nn.Module):
    """A module that scales every value of a feature map by a number between 0 and 1.

        y = x ⊙ gate(x)

    Feature maps `[batch, channels, height, width]` of any size in and out; a gate of your own is a
    subclass that defines `gate`. Items of a batch do not see each other, except in gates that
    document a batch normalization, and there in training only.

    The map of an untrained gate is about ½ everywhere (¼ for `CoordinateAttention`). A gate that is
    inserted into a trained network therefore weakens its features at first.

    Args:
        channels: channels of the map; None: any number, for gates whose parameters do not depend on
            it.

    Raises:
        ValueError: sizes that are not positive, a kernel size that is not odd, an unknown choice; a
            map of another shape or without pixels.
    """

    def __init__(self, channels: int | None) -> None:
        super().__init__()
        at_least(1, channels=channels)
        self.channels = channels

    def gate(self, x: Tensor) -> Tensor:
        """Return the map that scales x, in (0, 1): `[batch, 1 or channels, 1 or height, 1 or
        width]`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, self.channels, "x")
        return x * self.gate(x)


def hidden_width(channels: int, reduction: int, hidden_channels: int | None, least: int = 1) -> int:
    """Return `hidden_channels` if given, else channels // reduction, but at least `least`."""
    at_least(1, reduction=reduction, hidden_channels=hidden_channels)
    return hidden_channels or max(least, channels // reduction)


@contextmanager
def capture_gates(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the gate maps of a model while it runs.

        with attnkit.capture_gates(cbam) as maps:
            cbam(features)
        maps["channel"][0]    # [batch, channels, 1, 1]
        maps["spatial"][0]    # [batch, 1, height, width]

    The maps of each gate are stored, detached, under its name in `named_modules()`, in the order of
    its calls. They are the very maps that scaled the features. Nothing is computed twice, so the
    running statistics of batch norms change as they do without the capture. Compiled modules run
    uncompiled inside the block. Other threads are captured too if they run in this context, as
    those of `asyncio.to_thread` do.

    Args:
        model: any module that contains gates of attnkit, or other modules with a method `gate` that
            `forward` calls and that returns the map.

    Raises:
        ValueError: the model has no gate.
    """
    # looked up in the class: in other networks an attribute `gate` often is a child module
    gates = {
        module_name(name): module
        for name, module in model.named_modules()
        if callable(getattr(type(module), "gate", None))
    }
    if not gates:
        raise ValueError(f"model: {type(model).__name__} has no gates")
    captured: dict[str, list[Tensor]] = {}
    names = {module: name for name, module in gates.items()}
    running = RunningModules(model)

    def note(module: nn.Module, map_: Tensor) -> None:
        if module in names:
            running.keep(captured, names[module], map_)

    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        stack.enter_context(running.followed())
        stack.enter_context(_CAPTURES.opened(note))
        for module in gates.values():
            stack.enter_context(shared(("gate", module), partial(_reporting, module)))
        yield captured


_CAPTURES: Opened[Callable[[nn.Module, Tensor], None]] = Opened("captures of gates")


def _reporting(module: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which `module.gate` passes its map to every open capture."""
    gate = getattr(module, "gate")  # noqa: B009  mypy takes module.gate for a child

    def reporting_gate(*args: object, **kwargs: object) -> Tensor:
        map_ = gate(*args, **kwargs)
        for note in _CAPTURES.get():
            note(module, map_.detach())
        return map_

    return patch.object(module, "gate", reporting_gate)
