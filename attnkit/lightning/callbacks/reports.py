"""Tables and pictures of a test: of classes, of several labels, of numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics.functional.classification import binary_average_precision

from attnkit.lightning.console import in_line, in_picture
from attnkit.lightning.files import replacing, write_csv
from attnkit.lightning.modules.classification import ClassScore
from attnkit.lightning.modules.values import ranks_of

_MAX_NUMBERS = 20
_MAX_NAMES = 100
_MAX_DRAWN = 60


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


def draw_confusion(confusion: Tensor, class_names: Sequence[str], path: Path) -> None:
    """Draw the matrix as a picture: rows are true classes, colours are shares of the row.

    Args:
        confusion: counts [true classes, predicted classes].
        class_names: labels of the axes for up to 100 classes; counts are written for up to 20.
        path: PNG file.
    """
    count = len(class_names)
    counts = confusion.cpu().double()
    shares = (counts / counts.sum(dim=1, keepdim=True).clamp_min(1)).numpy()
    side = min(max(4.0, 2 + 0.45 * count), 20.0)
    figure = _figure(side + 1, side)
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
    _save(figure, path)


def _short(name: str, length: int = 20) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


class ValueReport(Callback):
    """Writes `per_label.csv` and `per_label.png` for labels, and `predicted.png` for numbers.

    The table has the threshold, average precision, precision, recall, F1 and support of each label;
    the picture draws them for up to 60 labels, the most frequent ones. `predicted.png` draws
    predictions over the truth, in a panel for each of up to six numbers. The first process writes.

    Args:
        folder: output folder, created if it does not exist.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        values = getattr(pl_module, "test_values", None)
        if not trainer.is_global_zero or values is None:
            return
        outputs, truth = (part.cpu() for part in values)
        module: Any = pl_module
        if not module.class_scores:
            self._draw_numbers(outputs, truth, module.class_names)
            return
        columns = zip(module.class_scores, module.thresholds.tolist(), strict=True)
        header = ("label", "threshold", "average_precision", *ClassScore._fields[1:])
        rows = [
            (score.name, threshold, _precision(outputs[:, n], truth[:, n]), *score[1:])
            for n, (score, threshold) in enumerate(columns)
        ]
        write_csv(self.folder / "per_label.csv", header, rows)
        self._draw_labels(header, rows)

    def _draw_labels(self, header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        rows = sorted(rows, key=lambda row: -row[-1])[:_MAX_DRAWN][::-1]
        figure = _figure(7, 1.5 + 0.3 * len(rows))
        axes = figure.add_subplot(xlim=(0, 1.02), xlabel="test")
        for column, mark in zip((2, 3, 4, 5), "sv^o", strict=True):
            found = [
                (row[column], place) for place, row in enumerate(rows) if row[column] is not None
            ]
            axes.scatter(*zip(*found, strict=True) if found else ((), ()), marker=mark,
                         label=header[column].replace("_", " "))  # fmt: skip
        names = [in_picture(f"{in_line(str(row[0]))[:30]} ({row[-1]})") for row in rows]
        axes.set_yticks(range(len(rows)), names)
        axes.grid(axis="y", alpha=0.3)
        figure.legend(loc="outside upper center", ncols=4)
        _save(figure, self.folder / "per_label.png")

    def _draw_numbers(self, outputs: Any, truth: Any, names: list[str]) -> None:
        count = min(6, len(names))
        figure = _figure(4.5 * count, 4.5)
        for place in range(count):
            known = ~truth[:, place].isnan()
            right, given = truth[known, place], outputs[known, place]
            title = in_picture(in_line(names[place])[:30])
            axes = figure.add_subplot(1, count, place + 1, xlabel="truth", title=title)
            axes.set_ylabel("predicted")
            axes.set_aspect("equal", adjustable="datalim")
            axes.scatter(right, given, s=8, alpha=0.5)
            if len(right):
                axes.axline((float(right.mean()),) * 2, slope=1, color="0.5", lw=1)
        _save(figure, self.folder / "predicted.png")


def _precision(outputs: Tensor, truth: Tensor) -> float | None:
    """Return the average precision of a label; None unless there are samples of 0 and of 1."""
    known = ~truth.isnan()
    labels = truth[known].long()
    if len(labels.unique()) < 2:
        return None
    return float(binary_average_precision(ranks_of(outputs[known]), labels))


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # not pyplot, which has a global state

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=120, bbox_inches="tight")
