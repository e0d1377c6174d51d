"""`callbacks=interpret` draws and scores maps of a model during training and in its test."""

import os
import time
from collections.abc import Mapping
from functools import partialmethod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor

from attnkit.core.arguments import at_least, choice
from attnkit.interpret.explain import explain
from attnkit.interpret.explanation import Explanation
from attnkit.interpret.layer_maps import chosen_layers, draw_layer
from attnkit.interpret.methods.words import captioner_of
from attnkit.interpret.picture import pixels_of, save
from attnkit.interpret.report.report import duration
from attnkit.interpret.trust.removal import REMOVALS, NotAvailableError
from attnkit.interpret.trust.result import CLASS_SENSITIVITY
from attnkit.lightning.console import say
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.files import in_log_folder, replacing
from attnkit.lightning.loggers import log_picture
from attnkit.lightning.protocols import Explained, by_turns, num_rows

History = dict[str, list[tuple[float, float]]]
"""For each score, (epoch, value) in order."""

_SHARDED = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)
_GAPS = {
    "interpret_gap": ("this map", "#b3300a", "-"),
    "interpret_gap_centre": ("centre", "#1f5fbf", "--"),
    "interpret_gap_input_gradient": ("input gradient", "#2a7f3f", ":"),
}
_SHARES = {
    "interpret_class_sensitivity": "class sensitivity\n(0: not of the class)",
    "interpret_prefix_share": "share of class and register tokens",
    "interpret_words": "share of words better than random",
}


class _Look(NamedTuple):
    """How a model is explained; it is the same in all epochs, so that they can be compared."""

    method: str
    removal: str


class Interpret(Callback):
    """Draws and scores maps of a few fixed validation images every n epochs.

    These scores of `attnkit.trust` for the predicted classes go to every logger:

    - `val/interpret_gap`: what p loses where the map points; `_centre` and `_input_gradient` are
      the gaps of these baselines
    - `val/interpret_random`: two standard errors of the gap of random maps, whose mean is 0
    - `val/interpret_class_sensitivity`: 0 for a map that cannot depend on the class; not logged for
      a single logit, which has no other class
    - `val/interpret_prefix_share`: share of the map on class and register tokens, if any
    - for a captioner, `val/interpret_gap` is the mean over the words, and `val/interpret_words` the
      share of words whose map is better than random

    The maps are drawn to `epoch_001.png`, …, and in a test, without scores, to `test.png`. Each
    picture also goes to every logger that takes images (TensorBoard, Weights & Biases).
    `scores.png` shows the scores over the epochs, also of a resumed run. With `trust="none"` the
    maps are only drawn. With `layer`, the picture shows a layer instead of a method's maps:
    attention over the image as a multiple of uniform attention, attention over channels as a
    matrix, gates between 0 and 1 as maps or curves, and for a captioner the attention at each word.

    The callback changes no random numbers, gradients or modes. With several processes the first one
    computes the maps, while the others wait at the next step. The cost, about 45 forwards for each
    image and time (200 for a caption), is printed after the sanity check, and the time it took at
    the end.

    The module's method `explained` (`attnkit.lightning.Explained`) defines what is explained;
    without it, the module itself is explained for the images that come first in a batch.

    Args:
        num_images: maximum number of images; they are taken from the first batch, from as many
            classes as possible.
        every_n_epochs: the maps are drawn in the first epoch, every n-th after it, and the last.
        method: a method of `attnkit.explain`; None: "relevance" if there is attention between the
            parts of the image, else "grad_cam", or "attention" for a captioner.
        trust: "fast" and "full" score the maps as `attnkit.trust` does; "none" does not.
        layer: a layer to draw, by its position or its name (`*` matches anything, and each layer is
            a row). It needs trust="none" and no method. Gates are drawn only if the model has no
            attention.
        folder: folder for the pictures; None: `interpret` in the trainer's log folder.

    Raises:
        ValueError: an argument out of range, or `layer` together with a method or scores.
        UserError: in the check before training: a graph model, a model for which the method or the
            layer does not work, or sharded weights (FSDP, DeepSpeed), which a single process cannot
            run.
    """

    def __init__(
        self,
        num_images: int = 8,
        every_n_epochs: int = 5,
        method: str | None = None,
        trust: Literal["fast", "full", "none"] | None = "fast",
        layer: int | str | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        at_least(1, num_images=num_images, every_n_epochs=every_n_epochs)
        trust = trust or "none"  # YAML may give None for an empty value
        choice(("fast", "full", "none"), trust=trust)
        if layer is not None and (method is not None or trust != "none"):
            raise ValueError(
                f"layer: {layer!r} is drawn without a method and scores; expected method=None and "
                f"trust='none', got {method!r} and {trust!r}"
            )
        self.num_images = num_images
        self.every_n_epochs = every_n_epochs
        self.method, self.trust, self.layer = method, trust, layer
        self._given_folder = folder
        self.folder: Path | None = None
        self.history: History = {}
        self._batch: Any = None
        self._look: _Look | None = None
        self._gap_of = "p"
        self._has_told_cost = False
        self._seconds = 0.0
        self._began = time.monotonic()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, _SHARDED):
            raise UserError(
                "Interpret: expected a strategy that keeps all weights in one process; "
                "explain the checkpoint afterwards"
            )
        self.folder = in_log_folder(trainer, self._given_folder, "interpret")
        # the layers of a captioner are checked when it runs
        if self.layer is not None and captioner_of(pl_module) is None:
            try:
                chosen_layers(pl_module, self.layer)
            except ValueError as error:
                raise UserError(f"Interpret: {first_line(error)}") from error

    @property
    def state_key(self) -> str:
        """The key of the history in a checkpoint, which differs between several such callbacks."""
        return f"Interpret(method={self.method!r}, layer={self.layer!r})"

    def state_dict(self) -> dict[str, Any]:
        return {"history": {name: list(points) for name, points in self.history.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        history = state_dict["history"].items()
        self.history = {
            name: [(epoch, value) for epoch, value in points] for name, points in history
        }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began, self._seconds = time.monotonic(), 0.0

    def _look_at(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
        *,
        stage: Literal["val", "test"],
    ) -> None:
        """Explain some images of the first batch, in a test or in a validation that is due."""
        is_due = stage == "test" or trainer.sanity_checking
        is_due = is_due or self._has_look(trainer.current_epoch, trainer)
        if batch_idx or dataloader_idx or not trainer.is_global_zero or not is_due:
            return
        start = time.monotonic()
        some = self._batch if stage == "val" else None
        if some is None:
            some = _some(batch, self.num_images)
        name = "test"
        if stage == "val":
            self._batch, name = some, f"epoch_{trainer.current_epoch + 1:03d}"
        with trainer.precision_plugin.forward_context():
            given = _explained(pl_module, some)
            figure, scores = self._looked(given, stage == "val" and self.trust != "none")
            if not trainer.sanity_checking:  # the sanity check only tests it and measures the time
                self._tell(trainer, scores)
                self._show(trainer, f"{stage}/interpret", figure, name)
        if stage == "test":
            return
        took = time.monotonic() - start
        self._seconds += took
        if not self._has_told_cost:
            self._has_told_cost = True
            self._say_cost(trainer, len(given.inputs), took)

    on_validation_batch_end: Any = partialmethod(_look_at, stage="val")
    on_test_batch_end: Any = partialmethod(_look_at, stage="test")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or not self._seconds:
            return
        assert self.folder is not None
        left = self.folder
        if self.history:
            left = self.folder / "scores.png"
            save(left, draw_history(self.history, self._gap_of))
        share = self._seconds / max(1e-9, time.monotonic() - self._began)
        say(f"interpret: {self._seconds:.1f} s, {100 * share:.1f} % of the training; {left}")

    def _has_look(self, epoch: int, trainer: Trainer) -> bool:
        return epoch % self.every_n_epochs == 0 or epoch + 1 == trainer.max_epochs

    def _looked(self, given: Explained, is_scored: bool) -> tuple[Figure, dict[str, float]]:
        """Return the picture, and the scores by name, without `val/`."""
        if given.kind in ("nodes", "graphs"):
            raise UserError(
                "Interpret: expected images or captions, got a graph; attnkit.explain explains "
                "its nodes"
            )
        try:
            if self.layer is not None:
                return draw_layer(given, self.layer).figure, {}
            method = self._look.method if self._look else self.method
            seen = explain(given.model, given.inputs, given.sentences, method)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"Interpret: {first_line(error)}") from error
        if self._look is None:  # the first time, the kind of removal is chosen too
            self._look = _Look(seen.method, _removal(seen) if self.trust != "none" else "")
        scores = self._scores(seen) if is_scored else {}
        return seen.draw(given.words or None, given.pictures), scores

    def _scores(self, seen: Explanation) -> dict[str, float]:
        full = self.trust == "full"
        if seen.words is not None:
            words = [word for words in seen.trust_words(full=full).scores for word in words]
            return {
                "interpret_gap": sum(word.gap for word in words) / len(words),
                "interpret_words": sum(word.is_better for word in words) / len(words),
            }
        assert self._look is not None
        removal = self._look.removal
        scores = {score.name: score for score in seen.trust(removals=[removal], full=full).scores}
        self._gap_of = seen.quantity.symbol
        gap = scores[f"gap in {self._gap_of}, {REMOVALS[removal]}"]
        found = {
            "interpret_gap": gap.map,
            "interpret_random": gap.within,
            "interpret_gap_centre": gap.centre,
            "interpret_gap_input_gradient": gap.input_gradient,
        }
        if CLASS_SENSITIVITY in scores and seen.has_target:
            found["interpret_class_sensitivity"] = scores[CLASS_SENSITIVITY].map
        if seen.share is not None:
            found["interpret_prefix_share"] = float(seen.share.mean())
        return {name: value for name, value in found.items() if value is not None}

    def _tell(self, trainer: Trainer, scores: dict[str, float]) -> None:
        """Store the scores, and log them."""
        for name, value in scores.items():
            self.history.setdefault(name, []).append((trainer.current_epoch + 1, value))
        # pl_module.log would repeat the values in epochs that have no new ones
        logged = {f"val/{name}": value for name, value in scores.items()}
        for logger in trainer.loggers if logged else ():
            logger.log_metrics({**logged, "epoch": trainer.current_epoch}, trainer.global_step)

    def _show(self, trainer: Trainer, key: str, figure: Figure, name: str) -> None:
        """Write a picture to the folder, and log it."""
        assert self.folder is not None
        pixels = pixels_of(figure)
        with replacing(self.folder / f"{name}.png") as file:
            Image.fromarray(pixels).save(file, "PNG")
        log_picture(trainer, key, pixels)

    def _say_cost(self, trainer: Trainer, number: int, each: float) -> None:
        """Print the time that one drawing takes, and all of a training whose end is known."""
        epochs = range(trainer.current_epoch, trainer.max_epochs or 0)
        times = sum(self._has_look(epoch, trainer) for epoch in epochs)
        of_all = f"; {times} time{'s' * (times > 1)}, {duration(times * each)}"
        of_all = of_all if trainer.state.fn == "fit" else ""
        what = self._look.method if self._look else f"layer {self.layer}"
        say(f"interpret: {what} of {number} images, {duration(each)} each time{of_all}")


def _explained(module: Any, batch: Any) -> Explained:
    """Return the inputs to explain, on the module's device."""
    batch = module.transfer_batch_to_device(batch, module.device, 0)
    if callable(getattr(module, "explained", None)):
        return module.explained(batch).of_one_size()
    images, *rest = batch if isinstance(batch, list | tuple) else [batch]
    if not isinstance(images, Tensor) or images.ndim != 4:
        raise UserError(
            "Interpret: expected a batch that begins with images [batch, channels, height, width], "
            f"or a module with a method explained(batch), as {type(module).__name__} has none"
        )
    pixels = images if images.is_floating_point() else images.float() / 255
    names = getattr(module, "class_names", None) or ()
    return Explained(module, pixels, pixels, class_names=names, truth=_labels(rest, len(images)))


def _labels(rest: list[Any], size: int) -> Tensor | None:
    """Return the labels after the images of a batch, if there are any."""
    labels = rest[0] if rest else None
    if not isinstance(labels, Tensor) or labels.shape != (size,) or labels.is_floating_point():
        return None
    return labels


def _removal(seen: Explanation) -> str:
    if seen.words is not None:
        return "mean"
    try:
        seen.trust(removals=["mask"], fractions=[0.5], orders=2)
    except NotAvailableError:
        return "mean"
    return "mask"


def _some(batch: Any, number: int) -> Any:
    """Return some rows of a batch on the CPU, from as many classes as possible."""
    size = num_rows(batch)
    labels = _labels(list(batch[1:]), size) if isinstance(batch, list | tuple) else None
    rows = range(size) if labels is None else by_turns(labels.tolist(), number)
    return _rows(batch, list(rows)[:number], size)


def _rows(batch: Any, rows: list[int], size: int) -> Any:
    if isinstance(batch, Tensor):
        is_of_rows = batch.ndim and len(batch) == size
        return batch[torch.tensor(rows)].detach().cpu() if is_of_rows else batch
    if isinstance(batch, Mapping):
        return {name: _rows(value, rows, size) for name, value in batch.items()}
    if isinstance(batch, tuple) or (isinstance(batch, list) and isinstance(batch[0], Tensor)):
        return [
            [value[row].detach().cpu() for row in rows]
            if isinstance(value, list) and len(value) == size and isinstance(value[0], Tensor)
            else _rows(value, rows, size)
            for value in batch
        ]  # images of their own sizes are a list
    is_of_rows = isinstance(batch, list) and len(batch) == size
    return [batch[row] for row in rows] if is_of_rows else batch


def draw_history(history: History, gap_of: str) -> Figure:
    """Draw the gap of the map and of the baselines, and a panel for each other score.

    Args:
        history: the scores over the epochs.
        gap_of: the quantity of the gap, such as "p".
    """
    others = [name for name in _SHARES if history.get(name)]
    figure = Figure(figsize=(4.4 * (1 + len(others)), 3.4), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    first, *rest = panels = figure.subplots(1, 1 + len(others), squeeze=False)[0]
    if history.get("interpret_random"):
        epochs, within = zip(*history["interpret_random"], strict=True)
        low = [-value for value in within]
        first.fill_between(epochs, low, within, color="0.85", label="random maps, ± 2 s.e.")
    first.axhline(0, color="0.4", lw=0.8)
    for name, (label, colour, style) in _GAPS.items():
        if history.get(name):
            points = zip(*history[name], strict=True)
            first.plot(*points, color=colour, ls=style, marker="o", ms=3, label=label)
    first.set_title(f"gap in {gap_of}: what is lost where the map points", fontsize=10)
    first.set_ylabel(f"gap in {gap_of}", fontsize=9)
    first.legend(frameon=False, fontsize=8)
    for panel, name in zip(rest, others, strict=True):
        panel.plot(*zip(*history[name], strict=True), color="#b3300a", marker="o", ms=3)
        panel.set_title(_SHARES[name], fontsize=10)
        panel.set_ylim(0, 1.1 * max(value for _, value in history[name]) or 1)
    last = max(epoch for points in history.values() for epoch, _ in points)
    for panel in panels:
        panel.set_xlabel("epoch", fontsize=9)
        panel.set_xlim(0.5, last + 0.5)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        panel.tick_params(labelsize=8)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return figure
