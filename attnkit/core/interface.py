"""The attention interface of transformers, whose functions can be handled while a model runs.

Models of transformers ask `AttentionInterface` for the function that their configuration names.
Nothing of transformers is imported.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from attnkit.core.contexts import Opened, shared

Handler = Callable[..., tuple]
"""What runs in the place of a function, of (its name, the function, its arguments)."""

_handlers: Opened[Handler] = Opened("transformers' interface")


@contextmanager
def interface_handled(handler: Handler) -> Iterator[None]:
    """In the block functions of the interface are given to `handler`, and those that it calls to
    the handler of the next block around this."""
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    chosen = getattr(interface, "get_interface", None)
    if interface is None or chosen is None:
        yield
        return

    def get_interface(self: Any, name: str, default: Callable) -> Callable:
        return partial(_handled, name, chosen(self, name, default))

    with (
        _handlers.opened(handler),
        shared(interface, lambda: patch.object(interface, "get_interface", get_interface)),
    ):
        yield


def _handled(name: str, function: Callable[..., tuple], *args: Any, **options: Any) -> tuple:
    for handler in _handlers.get():
        function = partial(handler, name, function)
    return function(*args, **options)
