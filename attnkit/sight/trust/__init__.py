"""How far to trust a map: what is lost where it points, against what is lost anywhere."""

from attnkit.sight.trust.curves import PerturbationCurves, perturbation_curves
from attnkit.sight.trust.judge import trust
from attnkit.sight.trust.result import VERDICTS, Score, Trust

__all__ = ["VERDICTS", "PerturbationCurves", "Score", "Trust", "perturbation_curves", "trust"]
