"""Listeners of attention, and how `attend` notifies them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attnkit.core.check import check_inputs
from attnkit.core.contexts import Opened
from attnkit.core.inputs import Inputs


@dataclass(frozen=True, eq=False)
class Seen:
    """One attention that ran, without the name of its layer."""

    tap: str
    inputs: Inputs
    output: Tensor
    """[batch, heads, queries, value_dim]; what the caller gets is this tensor or a view of it."""
    is_batched: bool = True
    """Whether the caller gave tensors with a batch; those of graphs have none."""
    module: nn.Module | None = None
    """Where it ran, if that is not the innermost module that is running."""


class Listener(Protocol):
    def see(self, seen: Seen) -> None:
        """Attention ran."""

    def miss(self, what: str, advice: str) -> None:
        """Attention ran that cannot be observed: which one it is, and what helps."""


LISTENERS: Opened[Listener] = Opened("listeners")


def unheard() -> AbstractContextManager[tuple[Listener, ...]]:
    """In the block listeners are not notified, because they are notified of the whole; gives
    them."""
    return LISTENERS.limited(0)


def is_recomputed() -> bool:
    """Whether a backward pass is running, in which activation checkpointing runs a forward again:
    listeners are not notified twice."""
    return torch._C._current_graph_task_id() != -1


def tell_missed(listeners: Sequence[Listener], *, is_nested: bool = False) -> None:
    """Attention ran that cannot be seen: on nested tensors, or by the model's own functions."""
    for listener in listeners:
        if is_nested:
            listener.miss("of nested tensors", "pad them and give a mask")
        else:
            listener.miss("by functions of its own", "attnkit.replace_attention(model) first")


def tell(listeners: Sequence[Listener], seen: Seen) -> None:
    for listener in listeners:
        listener.see(seen)


def watched(attend: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
    """`attend(**given)`, of which listeners are notified; torch's calls inside it are not
    reported."""
    if is_recomputed():
        with unheard():
            return attend(**given)
    is_batched = not given["query"].ndim == given["key"].ndim == given["value"].ndim == 3
    if not is_batched:
        # what is told is then on the way to what the caller gets, so that it has a gradient
        given = given | {name: given[name][None] for name in ("query", "key", "value")}
    with unheard() as listeners:
        output = attend(**given)
        options = {name: option for name, option in given.items() if name != "backend"}
        tell(listeners, Seen("attend", check_inputs(**options), output, is_batched))
    return output if is_batched else output[0]
