"""The scores per class and the confusion matrix of a test."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning import Callback, LightningModule, Trainer
from rich.table import Table
from torch import Tensor

from attnkit.lightning.console import cell, in_line, in_picture, say_table
from attnkit.lightning.files import replacing, write_csv

_MAX_SHOWN = 40
_MAX_NUMBERS = 20
_MAX_NAMES = 100


class ClassScore(NamedTuple):
    """The scores of one class; None where a ratio has no denominator.

    `support` is the number of samples of the class.
    """

    name: str
    precision: float | None
    recall: float | None
    f1: float | None
    support: int


class ClassReport(Callback):
    """Writes `per_class.csv` and `confusion_matrix.png` for a test of a `ClassificationModule`.

    The picture is drawn for up to 1,000 classes. The first process writes.

    Args:
        folder: output folder, created if it does not exist.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        scores = getattr(pl_module, "class_scores", None)
        confusion = getattr(pl_module, "confusion", None)
        if not trainer.is_global_zero or scores is None:
            return
        columns = (scores[0] if scores else ClassScore)._fields[1:]
        write_csv(self.folder / "per_class.csv", ("class", *columns), scores)
        if confusion is not None:
            names = [score.name for score in scores]
            draw_confusion(confusion, names, self.folder / "confusion_matrix.png")


def class_scores(stats: Tensor, class_names: Sequence[str]) -> list[ClassScore]:
    """Return scores from counts [classes, 5]: true positives, false positives, true negatives,
    false negatives, support."""
    scores = []
    for name, (hits, false, _, misses, support) in zip(class_names, stats.tolist(), strict=True):
        precision, recall = _ratio(hits, hits + false), _ratio(hits, hits + misses)
        f1 = _ratio(2 * hits, 2 * hits + false + misses)
        scores.append(ClassScore(name, precision, recall, f1, int(support)))
    return scores


def show_class_scores(scores: Sequence[ClassScore], kind: str = "class") -> None:
    """Print a table on screen and in run.log; of many classes, those with samples and the lowest F1
    come first and the rest is left out."""
    shown = list(scores)
    title = f"test, per {kind}"
    if len(scores) > _MAX_SHOWN:
        worst = sorted(scores, key=lambda s: (not s.support, -1.0 if s.f1 is None else s.f1))
        shown = worst[:_MAX_SHOWN]
        title += f": the {_MAX_SHOWN} of {len(scores)} with the lowest F1"
    table = Table(title=title)
    table.add_column(kind)
    for column in scores[0]._fields[1:]:
        table.add_column(column, justify="right")
    for score in shown:
        texts = ["–" if ratio is None else f"{100 * ratio:.1f} %" for ratio in score[1:-1]]
        table.add_row(cell(score.name), *texts, str(score.support))
    say_table(table)


def draw_confusion(confusion: Tensor, class_names: Sequence[str], path: Path) -> None:
    """Draw the matrix as a picture: rows are true classes, colours are shares of the row.

    Args:
        confusion: counts [true classes, predicted classes].
        class_names: labels of the axes for up to 100 classes; counts are written for up to 20.
        path: PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(class_names)
    counts = confusion.cpu().double()
    shares = (counts / counts.sum(dim=1, keepdim=True).clamp_min(1)).numpy()
    side = min(max(4.0, 2 + 0.45 * count), 20.0)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    axes = figure.add_subplot(xlabel="predicted", ylabel="true")
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    if count <= _MAX_NAMES:
        size = 10 if count <= _MAX_NUMBERS else 6
        names = [in_picture(_short(in_line(name))) for name in class_names]
        upright = 90 if max(map(len, names)) > 4 else 0
        axes.set_xticks(range(count), names, rotation=upright, fontsize=size)
        axes.set_yticks(range(count), names, fontsize=size)
    if count <= _MAX_NUMBERS:
        for row in range(count):
            for column in range(count):
                if number := int(counts[row, column]):
                    colour = "white" if shares[row, column] > 0.5 else "black"
                    axes.text(column, row, str(number), color=colour, ha="center", va="center")
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=120, bbox_inches="tight")


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _short(name: str, length: int = 20) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"
