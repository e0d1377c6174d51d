"""Checks of randomness: only dropout may be random, and only in training."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from attnkit.checks.report import Outcome, share, within
from attnkit.checks.subject import MODES, Subject, difference

SEEDS = 16  # number of equal calls in training after which nothing counts as random
RUNS = 3


def dropout(subject: Subject) -> Outcome:
    """Check that eval repeats, and that training is random with dropout, else equal to eval."""
    first = subject.output(subject.tokens)
    found = difference(subject.output(subject.tokens, seed=1), first)
    if found:
        return "fail", f"eval: two calls differ by {share(found)}"
    trained = subject.output(subject.tokens, mode="training")
    for seed in range(1, SEEDS):
        if difference(subject.output(subject.tokens, mode="training", seed=seed), trained):
            return "pass", "eval repeats to the bit, training is random"
    if layers := _layers_with_dropout(subject.module):
        return "fail", f"dropout of {', '.join(layers)} does nothing in training"
    found = difference(trained, first)
    if found <= subject.tolerance:
        return "pass", f"nothing is random; training equals eval {within(found)}"
    return "note", f"nothing is random, but training differs from eval by {share(found)}"


def determinism(subject: Subject) -> Outcome:
    """Check that the same seed and input give bit-identical output and gradients."""
    used = subject.output(subject.tokens)
    first = {mode: subject.gradients(None, mode) for mode in MODES}
    for _ in range(RUNS - 1):
        if found := difference(subject.output(subject.tokens), used):
            return "fail", f"eval: two outputs differ by {share(found)}"
        for mode, (output, gradients) in first.items():
            again, gradients_again = subject.gradients(None, mode)
            if found := difference(again, output):
                return "fail", f"{mode}: two outputs differ by {share(found)}"
            if found := max(map(difference, gradients_again, gradients)):
                return "fail", f"{mode}: two gradients differ by {share(found)}"
    return "pass", f"{RUNS} runs of one seed: outputs and gradients equal to the bit"


def _layers_with_dropout(module: nn.Module) -> list[str]:
    found = []
    for name, child in module.named_modules():
        names = ["p"] if isinstance(child, _DropoutNd) else ["dropout", "dropout_p"]
        values = (getattr(child, attribute, 0) for attribute in names)
        if any(isinstance(value, float) and value > 0 for value in values):
            found.append(name or "the module")
    return found
