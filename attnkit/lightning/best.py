"""Which of two validations is the better: the direction of each metric, and what ties go to.

It needs no torch: the command line looks here before anything is imported.
"""

import math
from collections.abc import Mapping
from typing import Literal, SupportsFloat

Mode = Literal["min", "max"]
LOSS = "val/loss"

# The last words of a metric's name. A test holds them against the `higher_is_better` of every
# metric that a task logs.
_LESS = {"loss", "error", "err", "mae", "mse", "rmse", "nll", "perplexity", "ppl", "wer", "cer",
         "ece", "fid"}  # fmt: skip
_MORE = {"accuracy", "acc", "f1", "auroc", "auc", "ap", "map", "precision", "recall", "iou", "miou",
         "dice", "bleu", "rouge", "rouge_l", "cider", "cider_d", "meteor", "spice", "r2", "mrr",
         "hits", "interpret_gap", "interpret_words"}  # fmt: skip


def mode_of(monitor: str) -> Mode | None:
    """Whether less of a metric is better, "min", or more, "max", by its name; None: not known.

    `val/balanced_accuracy` and `val_acc` are of the kind of their last word, as `val/bleu4` is of
    `bleu`.
    """
    name = monitor.rpartition("/")[2].lower()
    for words in (name, name.rpartition("_")[2], name.rpartition("_")[2].rstrip("0123456789")):
        if words in _LESS:
            return "min"
        if words in _MORE:
            return "max"
    return None


def mode_for(monitor: str, mode: Mode | None = None) -> Mode:
    """The mode that was given, else that of the metric.

    Raises:
        ValueError: none was given, and the metric is not known.
    """
    if mode is None and (mode := mode_of(monitor)) is None:
        raise ValueError(
            f"mode: expected min or max; whether less or more of {monitor!r} is better is not known"
        )
    return mode


def contradiction(monitor: str, mode: str, right: Mode | None) -> str:
    """What to say of a mode that is not that of its metric; nothing where it may be."""
    if right is None or mode == right or mode not in ("min", "max"):
        return ""
    amount = "less" if right == "min" else "more"
    return f"got {mode}, but {amount} of {monitor!r} is better: give {right}, or null"


def rank(figures: Mapping[str, float], monitor: str, mode: str) -> tuple[float, float]:
    """A key to sort validations by, the best first: the metric, and of equal ones `val/loss`.

    NaN, and a metric that is not there, are worse than any number.
    """
    score, loss = figures.get(monitor, math.nan), figures.get(LOSS, math.nan)
    keys = (score if mode == "min" else -score, loss)
    return tuple(math.inf if math.isnan(key) else key for key in keys)  # type: ignore[return-value]


def validation(metrics: Mapping[str, SupportsFloat], monitor: str) -> dict[str, float]:
    """What is noted of a validation: its metrics, and the one that is followed."""
    return {n: float(v) for n, v in metrics.items() if n.startswith("val/") or n == monitor}
