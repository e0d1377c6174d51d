"""How far to trust a map: what a prediction loses without the patches that it ranks first."""

from attnkit.sight.trust.curves import PerturbationCurves, perturbation_curves
from attnkit.sight.trust.judge import trust
from attnkit.sight.trust.result import VERDICTS, Score, Trust

__all__ = ["VERDICTS", "PerturbationCurves", "Score", "Trust", "perturbation_curves", "trust"]
