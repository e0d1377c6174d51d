"""Measures of how far to trust a map: what a prediction loses without its top-ranked patches."""

from attnkit.interpret.trust.curves import PerturbationCurves, perturbation_curves
from attnkit.interpret.trust.judge import trust
from attnkit.interpret.trust.result import VERDICTS, Score, Trust

__all__ = ["VERDICTS", "PerturbationCurves", "Score", "Trust", "perturbation_curves", "trust"]
