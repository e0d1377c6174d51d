"""The comparison of two validations: the direction of each metric, and how ties are broken.

It needs no torch: the command line uses it before anything is imported.
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
    """Return "min" if less of a metric is better and "max" if more is, by its name; None: unknown.

    The last word decides, as in `val/balanced_accuracy` and `val_acc`, without its digits, as in
    `val/bleu4`.
    """
    name = monitor.rpartition("/")[2].lower()
    for words in (name, name.rpartition("_")[2], name.rpartition("_")[2].rstrip("0123456789")):
        if words in _LESS:
            return "min"
        if words in _MORE:
            return "max"
    return None


def mode_for(monitor: str, mode: Mode | None = None) -> Mode:
    """Return the given mode, or else that of the metric.

    Raises:
        ValueError: no mode is given, and the metric is unknown.
    """
    if mode is None and (mode := mode_of(monitor)) is None:
        raise ValueError(
            f"mode: expected min or max; whether less or more of {monitor!r} is better is not known"
        )
    return mode


def contradiction(monitor: str, mode: str, right: Mode | None) -> str:
    """Return the error text for a mode that contradicts its metric; empty if it does not."""
    if right is None or mode == right or mode not in ("min", "max"):
        return ""
    amount = "less" if right == "min" else "more"
    return f"got {mode}, but {amount} of {monitor!r} is better: give {right}, or null"


def rank(figures: Mapping[str, float], monitor: str, mode: str) -> tuple[float, float]:
    """Return a key that sorts validations, the best first: the metric, then `val/loss` for ties.

    NaN and a missing metric are worse than any number.
    """
    score, loss = figures.get(monitor, math.nan), figures.get(LOSS, math.nan)
    keys = (score if mode == "min" else -score, loss)
    return tuple(math.inf if math.isnan(key) else key for key in keys)  # type: ignore[return-value]


def validation(metrics: Mapping[str, SupportsFloat], monitor: str) -> dict[str, float]:
    """Return the figures to note of a validation: its metrics and the monitored one."""
    return {n: float(v) for n, v in metrics.items() if n.startswith("val/") or n == monitor}
