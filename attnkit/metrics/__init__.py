"""Metrics for torchmetrics: of captions, and of maps that say where a model looks.

Captions, without Java: BLEU, ROUGE-L, CIDEr, CIDEr-D; METEOR with it.

    scores = MetricCollection({"cider": CIDErD(), "rouge": ROUGEL()} | {f"bleu{n}": BLEU(n) …})
    scores.update(["a dog runs"], [["a dog is running", "the dog runs"]])
    scores.compute()

On the same tokens their numbers are those of the scorers that papers report, pycocoevalcap and
vrama91/cider. Each class says its formula, and where these scorers differ from their papers.

Maps: `PerturbationGap`, `PointingGame` and `AttributionMass`, of whole test sets.
"""

from typing import TYPE_CHECKING

from attnkit.core.lazy import lazy

if TYPE_CHECKING:
    from attnkit.metrics.bleu import BLEU
    from attnkit.metrics.captions import CaptionMetric
    from attnkit.metrics.cider import CIDEr, CIDErD
    from attnkit.metrics.localisation import AttributionMass, PointingGame
    from attnkit.metrics.meteor import METEOR
    from attnkit.metrics.perturbation import PerturbationGap
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
