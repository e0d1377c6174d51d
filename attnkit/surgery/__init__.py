"""Inserts attention into any network, and replaces a network's own by the shared block."""

from typing import TYPE_CHECKING

from attnkit.core.names import lazy

if TYPE_CHECKING:
    from attnkit.surgery.insert import insert_attention, remove_attention
    from attnkit.surgery.replace import replace_attention
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["insert_attention", "remove_attention", "replace_attention"]
