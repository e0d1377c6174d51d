"""Listeners that attention notifies when it runs, such as captures of weights."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attnkit.core.contexts import Opened
from attnkit.core.inputs import Inputs, check_inputs


@dataclass(frozen=True, eq=False)
class Seen:
    """One attention that ran, without the name of its layer."""

    tap: str
    inputs: Inputs
    output: Tensor
    """[batch, heads, queries, value_dim]; the caller gets this tensor or a view of it."""
    is_batched: bool = True
    """Whether the caller's tensors have a batch dimension; those of graphs have none."""
    module: nn.Module | None = None
    """The module in which it ran, if that is not the innermost running module."""


class Listener(Protocol):
    """An observer of attention."""

    def see(self, seen: Seen) -> None:
        """Handle an attention that ran."""

    def miss(self, what: str, advice: str) -> None:
        """Handle an attention that ran and cannot be observed: a description, and advice."""


LISTENERS: Opened[Listener] = Opened("listeners")


def without_listeners() -> AbstractContextManager[tuple[Listener, ...]]:
    """Suspend the listeners in the block, which they are notified of as a whole; yields them."""
    return LISTENERS.limited(0)


def is_recomputed() -> bool:
    """Return whether a backward pass is running: a forward in it is a second run by activation
    checkpointing, of which listeners are not notified."""
    return torch._C._current_graph_task_id() != -1


def notify_missed(listeners: Sequence[Listener], *, is_nested: bool = False) -> None:
    """Notify the listeners of attention that cannot be observed: on nested tensors, or by the
    model's own functions."""
    for listener in listeners:
        if is_nested:
            listener.miss("of nested tensors", "pad them and give a mask")
        else:
            listener.miss("by functions of its own", "attnkit.replace_attention(model) first")


def notify(listeners: Sequence[Listener], seen: Seen) -> None:
    """Notify the listeners of an attention that ran."""
    for listener in listeners:
        listener.see(seen)


def watched(attend: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
    """Compute `attend(**given)` and notify the listeners of it, but not of torch's calls inside."""
    if is_recomputed():
        with without_listeners():
            return attend(**given)
    is_batched = not given["query"].ndim == given["key"].ndim == given["value"].ndim == 3
    if not is_batched:
        # the caller's output is then computed from the observed one, which so has a gradient
        given = given | {name: given[name][None] for name in ("query", "key", "value")}
    with without_listeners() as listeners:
        output = attend(**given)
        options = {name: option for name, option in given.items() if name != "backend"}
        notify(listeners, Seen("attend", check_inputs(**options), output, is_batched))
    return output if is_batched else output[0]
