"""Inserts attention into any network, and replaces a network's own by the shared block."""

from attnkit.surgery.insert import insert_attention, remove_attention
from attnkit.surgery.replace import replace_attention

__all__ = ["insert_attention", "remove_attention", "replace_attention"]
