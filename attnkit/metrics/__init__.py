"""Metrics for torchmetrics: for captions, and for maps of where a model looks.

Caption metrics are BLEU, ROUGE-L, CIDEr and CIDEr-D, and METEOR, which needs Java.

    scores = MetricCollection({"cider": CIDErD(), "rouge": ROUGEL()} | {f"bleu{n}": BLEU(n) …})
    scores.update(["a dog runs"], [["a dog is running", "the dog runs"]])
    scores.compute()

On the same tokens they give the numbers of the scorers that papers use, pycocoevalcap and
vrama91/cider. Each class documents its formula, and where these scorers differ from their papers.

Metrics of maps over whole test sets are `PerturbationGap`, `PointingGame` and `AttributionMass`.
"""

from typing import TYPE_CHECKING

from attnkit.core.names import lazy

if TYPE_CHECKING:
    from attnkit.metrics.bleu import BLEU
    from attnkit.metrics.captions import CaptionMetric
    from attnkit.metrics.cider import CIDEr, CIDErD
    from attnkit.metrics.maps import AttributionMass, PerturbationGap, PointingGame
    from attnkit.metrics.meteor import METEOR
    from attnkit.metrics.rouge import ROUGEL
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "BLEU",
    "METEOR",
    "ROUGEL",
    "AttributionMass",
    "CIDEr",
    "CIDErD",
    "CaptionMetric",
    "PerturbationGap",
    "PointingGame",
]
