"""Masks: where a query may look. **True = may look**, here and everywhere in attnkit."""

from typing import TYPE_CHECKING

from attnkit.core.names import lazy

if TYPE_CHECKING:
    from attnkit.core.masks.base import And, Dense, Mask, Not, Or, as_mask
    from attnkit.core.masks.edges import EdgeFeatures, Edges
    from attnkit.core.masks.grids import Blocks, Window2d
    from attnkit.core.masks.plan import BlockCounts, Plan, QueryBlocks
    from attnkit.core.masks.sequences import Causal, Packed, Padding, Window
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "And",
    "BlockCounts",
    "Blocks",
    "Causal",
    "Dense",
    "EdgeFeatures",
    "Edges",
    "Mask",
    "Not",
    "Or",
    "Packed",
    "Padding",
    "Plan",
    "QueryBlocks",
    "Window",
    "Window2d",
    "as_mask",
]
