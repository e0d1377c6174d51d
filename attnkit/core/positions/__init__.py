"""Position encodings that are added to tokens, applied to queries and keys, or added to scores."""

from typing import TYPE_CHECKING

from attnkit.core.names import lazy

if TYPE_CHECKING:
    from attnkit.core.positions.absolute import (
        FactorizedPositions2d,
        LearnedPositions1d,
        LearnedPositions2d,
        Resampling,
        sincos_1d,
        sincos_2d,
    )
    from attnkit.core.positions.relative import (
        ALiBi,
        RelativeBias1d,
        RelativeBias2d,
        Rotary1d,
        Rotary2d,
        Rotation,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ALiBi",
    "FactorizedPositions2d",
    "LearnedPositions1d",
    "LearnedPositions2d",
    "RelativeBias1d",
    "RelativeBias2d",
    "Resampling",
    "Rotary1d",
    "Rotary2d",
    "Rotation",
    "sincos_1d",
    "sincos_2d",
]
