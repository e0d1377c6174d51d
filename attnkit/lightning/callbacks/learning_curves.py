"""A picture of all metrics over the epochs."""

import os
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning import Callback, LightningModule, Trainer

from attnkit.lightning.files import in_log_folder, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = dict[str, list[tuple[float, float]]]
"""For each metric, (epoch, value) in order."""

PLAIN = "train/plain_loss"  # the loss without label smoothing
COLOURS = {"train": "#7f7f7f", "val": "#1f77b4"}


class LearningCurves(Callback):
    """Draws every logged metric over the epochs, `train/loss` and `val/loss` in one panel.

    `train/plain_loss`, if it exists, can be compared with `val/loss` and is drawn in the same
    panel; `train/loss` is then labelled as the minimised one.

    It needs no logger: it notes the values at the end of each epoch and validation. They are part
    of the checkpoint, so that the picture of a resumed run is whole. It draws when training ends,
    also after an error, and meanwhile at most every `every_seconds`.

    Args:
        path: path of the picture (PNG, PDF or SVG); None: `learning_curves.png` in the trainer's
            log folder.
        every_seconds: time between updates of the picture while training runs.
        skip: patterns of metrics that are not drawn.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        every_seconds: float = 60.0,
        skip: Sequence[str] = ("*/samples_per_second",),
    ) -> None:
        self._given_path = path
        self.path: Path | None = None
        self.every_seconds = every_seconds
        self.skip = tuple(skip)
        self.history: History = {}
        self._drawn = time.monotonic()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.path = in_log_folder(trainer, self._given_path, "learning_curves.png")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            batches = trainer.num_training_batches
            self._note(trainer, "val/", (trainer.fit_loop.batch_idx + 1) / batches)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(trainer, "train/", 1.0)
        if time.monotonic() - self._drawn >= self.every_seconds:
            self._draw(trainer)

    def state_dict(self) -> dict[str, Any]:
        # one tensor for each metric: to save an object for each number takes long
        history = self.history.items()
        return {"history": {n: torch.tensor(p, dtype=torch.float64) for n, p in history}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = {
            name: [(epoch, value) for epoch, value in torch.as_tensor(points).tolist()]
            for name, points in state_dict["history"].items()
        }

    def _note(self, trainer: Trainer, stage: str, share_of_epoch: float) -> None:
        epoch = trainer.current_epoch + share_of_epoch
        for name, value in trainer.callback_metrics.items():
            if name.startswith(stage) and not any(fnmatchcase(name, skip) for skip in self.skip):
                self.history.setdefault(name, []).append((epoch, float(value)))

    def _draw(self, trainer: Trainer, *args: Any) -> None:
        self._drawn = time.monotonic()
        if trainer.is_global_zero and self.history and self.path is not None:
            figure = draw_curves(self.history)
            with replacing(self.path) as file:
                figure.savefig(file, format=self.path.suffix[1:] or None, dpi=150)

    on_train_end: Any = _draw
    on_exception: Any = _draw


def draw_curves(history: History) -> "Figure":
    """Draw a panel for each name after the slash, with a line for each stage; the loss first."""
    from matplotlib.figure import Figure

    names = sorted({_panel_of(name) for name in history}, key=lambda n: (n != "loss", n))
    columns = 2 if len(names) == 4 else min(len(names), 3)
    rows = -(-len(names) // columns)
    width, height = 4.2 * columns, 3.0 * rows
    figure = Figure(figsize=(width, height))
    # margins in inches: fitting them to the labels makes matplotlib draw everything twice
    figure.subplots_adjust(
        left=0.6 / width, right=1 - 0.15 / width, bottom=0.5 / height, top=1 - 0.3 / height,
        wspace=0.25, hspace=0.4,
    )  # fmt: skip
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, name in zip(panels, names, strict=False):
        _draw_panel(panel, name, history)
    for panel in panels[len(names) :]:
        panel.remove()
    return figure


def _panel_of(name: str) -> str:
    """Return the panel in which a metric is drawn: its name after the stage."""
    return "loss" if name == PLAIN else name.partition("/")[2]


def _draw_panel(panel: "Axes", name: str, history: History) -> None:
    from matplotlib.ticker import MaxNLocator

    for key in sorted(key for key in history if _panel_of(key) == name):
        points, stage = history[key], key.partition("/")[0]
        if points:
            epochs, values = zip(*points, strict=True)
            marker = "o" if len(points) < 20 else None
            minimised = key == "train/loss" and PLAIN in history
            label = f"{stage}, plain" if key == PLAIN else stage
            panel.plot(
                epochs, values, color=COLOURS.get(stage), marker=marker, ms=3, lw=1.5,
                ls=":" if minimised else "-",
                label="train, as minimised" if minimised else label,
            )  # fmt: skip
    last = max((epochs[-1][0] for key, epochs in history.items() if epochs), default=1)
    if last <= 1:  # a single point has no scale of its own
        panel.set_xlim(0.5, 1.5)
    panel.set_title(name.replace("_", " "), fontsize=10, y=1.0)
    panel.set_xlabel("epoch", fontsize=9)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    panel.tick_params(labelsize=8)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8)
