"""`callbacks=interpret`: maps of a model and their scores during training."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from matplotlib.figure import Figure
from torch import Tensor

from attnkit.interpret.by_turns import by_turns, num_rows
from attnkit.interpret.explain import explain
from attnkit.interpret.explanation import Explanation
from attnkit.interpret.picture import save
from attnkit.interpret.report.cost import duration
from attnkit.interpret.training.history import History, draw_history
from attnkit.interpret.training.show import show
from attnkit.interpret.trust.removal import REMOVALS, NotAvailableError
from attnkit.interpret.trust.result import CLASS_SENSITIVITY
from attnkit.interpret.usual_method import usual_method
from attnkit.lightning.arguments import at_least
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.explained import Explained
from attnkit.lightning.files import in_log_folder
from attnkit.lightning.telling.say import say

_SHARDED = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)


class _Look(NamedTuple):
    """How a model is explained: alike in all epochs, so that they can be compared."""

    method: str
    removal: str


class Interpret(Callback):
    """Maps of a few fixed images of the validation, and how far to trust them, every n epochs.

    Logged to every logger, of `attnkit.trust` of the predicted classes:

    - `val/interpret_gap`: what p loses where the map points; `_centre`, `_input_gradient`: of those
    - `val/interpret_random`: a random map's gap is this near to 0, two standard errors
    - `val/interpret_class_sensitivity`: 0 for a map that cannot depend on the class
    - `val/interpret_prefix_share`: what class and register tokens take of the map, if any
    - of a captioner, `val/interpret_gap` is the mean over the words, and `val/interpret_words` the
      share of words whose map is better than random

    A picture of the maps goes to the folder, `epoch_001.png`, and to every logger that takes images
    (TensorBoard, Weights & Biases); `scores.png` shows the scores over the epochs, also of a
    resumed run. Random numbers, gradients and modes are as they were without it. With several
    processes the first one computes the maps, while the others wait at the next step. The cost,
    about 45 forwards for each image and time (200 for a caption), is printed after the sanity
    check, and the time it took at the end.

    The module's method `explained` (`attnkit.lightning.Explained`) defines what is explained;
    without it, the module itself for the images that come first in a batch.

    Args:
        num_images: at most; of the first validation batch, of as many classes as it has.
        every_n_epochs: the first, every n-th after it, and the last.
        method: of `attnkit.explain`; None: "relevance" where there is attention between the parts
            of the image, else "grad_cam", or of a captioner "attention".
        folder: for the pictures; None for `interpret` in the trainer's log folder.

    Raises:
        UserError: in the check before training, a model of a graph, or one that the method does not
            serve; weights in parts (FSDP, DeepSpeed), which one process alone cannot run.
    """

    def __init__(
        self,
        num_images: int = 8,
        every_n_epochs: int = 5,
        method: str | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        at_least(1, num_images=num_images, every_n_epochs=every_n_epochs)
        self.num_images = num_images
        self.every_n_epochs = every_n_epochs
        self.method = method
        self._given_folder = folder
        self.folder: Path | None = None
        self.history: History = {}
        self._batch: Any = None
        self._look: _Look | None = None
        self._seconds = 0.0
        self._began = time.monotonic()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, _SHARDED):
            raise UserError(
                "Interpret: expected a strategy that keeps all weights in one process; "
                "explain the checkpoint afterwards"
            )
        self.folder = in_log_folder(trainer, self._given_folder, "interpret")

    def state_dict(self) -> dict[str, Any]:
        history = {name: [list(point) for point in points] for name, points in self.history.items()}
        return {"history": history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = {
            name: [(epoch, value) for epoch, value in points]
            for name, points in state_dict["history"].items()
        }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began, self._seconds = time.monotonic(), 0.0

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx or dataloader_idx or not trainer.is_global_zero or not self._is_due(trainer):
            return
        start = time.monotonic()
        if self._batch is None:
            self._batch = _some(batch, self.num_images)
        with trainer.precision_plugin.forward_context():
            is_first = self._look is None
            given = _explained(pl_module, self._batch)
            seen = self._seen(given)
            assert self._look is not None
            scores = _scores(seen, self._look.removal)
            figure = seen.draw(given.words or None, given.pictures)
            if not trainer.sanity_checking:  # which is only to learn that it works, and how long
                self._tell(trainer, scores, figure)
        took = time.monotonic() - start
        self._seconds += took
        if is_first:
            self._say_cost(trainer, seen, took)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or not self.history:
            return
        assert self.folder is not None
        save(self.folder / "scores.png", draw_history(self.history))
        share = self._seconds / max(1e-9, time.monotonic() - self._began)
        say(
            f"interpret: {self._seconds:.1f} s, {100 * share:.1f} % of the training; "
            f"{self.folder / 'scores.png'}"
        )

    def _is_due(self, trainer: Trainer) -> bool:
        return trainer.sanity_checking or self._has_look(trainer.current_epoch, trainer)

    def _has_look(self, epoch: int, trainer: Trainer) -> bool:
        return epoch % self.every_n_epochs == 0 or epoch + 1 == trainer.max_epochs

    def _say_cost(self, trainer: Trainer, seen: Explanation, each: float) -> None:
        """Of each time, and of all of a training whose end is known."""
        epochs = range(trainer.current_epoch, trainer.max_epochs or 0)
        times = sum(self._has_look(epoch, trainer) for epoch in epochs)
        of_all = f"; {times} time{'s' * (times > 1)}, {duration(times * each)}"
        of_all = of_all if trainer.state.fn == "fit" else ""
        what = f"{seen.method} of {len(seen.map)} images"
        say(f"interpret: {what}, {duration(each)} each time{of_all}")

    def _seen(self, given: Explained) -> Explanation:
        """The maps; the first time, the method and the kind of removal are chosen."""
        if given.kind == "nodes":
            raise UserError(
                "Interpret: expected images or captions, got a graph; attnkit.explain explains "
                "its nodes"
            )
        method = self.method or (self._look.method if self._look else usual_method(given))
        try:
            seen = explain(given.model, given.inputs, given.sentences, method)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"Interpret: {first_line(error)}") from error
        if self._look is None:
            self._look = _Look(seen.method, _removal(seen))
        return seen

    def _tell(self, trainer: Trainer, scores: dict[str, float], figure: Figure) -> None:
        assert self.folder is not None
        for name, value in scores.items():
            self.history.setdefault(name, []).append((trainer.current_epoch + 1, value))
        # not by the module's log, which would repeat them in the epochs without a look
        logged = {f"val/{name}": value for name, value in scores.items()}
        for logger in trainer.loggers:
            logger.log_metrics({**logged, "epoch": trainer.current_epoch}, trainer.global_step)
        path = self.folder / f"epoch_{trainer.current_epoch + 1:03d}.png"
        show(trainer, "val/interpret", figure, path)


def _explained(module: Any, batch: Any) -> Explained:
    """What the module says is explained, on its device."""
    batch = module.transfer_batch_to_device(batch, module.device, 0)
    if callable(getattr(module, "explained", None)):
        return module.explained(batch)
    images, *rest = batch if isinstance(batch, list | tuple) else [batch]
    if not isinstance(images, Tensor) or images.ndim != 4:
        raise UserError(
            "Interpret: expected a batch that begins with images [batch, channels, height, width], "
            f"or a module with a method explained(batch), as {type(module).__name__} has none"
        )
    truth = rest[0] if rest and isinstance(rest[0], Tensor) else None
    pixels = images if images.is_floating_point() else images.float() / 255
    return Explained(module, pixels, pictures=pixels, truth=truth)


def _removal(seen: Explanation) -> str:
    if seen.words is not None:
        return "mean"
    try:
        seen.trust(removals=["mask"], fractions=[0.5], orders=2)
    except NotAvailableError:
        return "mean"
    return "mask"


def _scores(seen: Explanation, removal: str) -> dict[str, float]:
    """By name, without `val/`."""
    if seen.words is not None:
        words = [word for words in seen.trust_words().scores for word in words]
        return {
            "interpret_gap": sum(word.gap for word in words) / len(words),
            "interpret_words": sum(word.is_better for word in words) / len(words),
        }
    trust = seen.trust(removals=[removal])
    gap = trust[f"gap in p, {REMOVALS[removal]}"]
    found = {
        "interpret_gap": gap.map,
        "interpret_random": gap.within,
        "interpret_gap_centre": gap.centre,
        "interpret_gap_input_gradient": gap.input_gradient,
    }
    if seen.has_target:
        found["interpret_class_sensitivity"] = trust[CLASS_SENSITIVITY].map
    if seen.share is not None and seen.num_prefix_tokens:
        found["interpret_prefix_share"] = float(seen.share.mean())
    return {name: value for name, value in found.items() if value is not None}


def _some(batch: Any, number: int) -> Any:
    """Some rows of a batch on the CPU, of as many classes as there are."""
    labels = batch[1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
    size = num_rows(batch)
    if isinstance(labels, Tensor) and labels.ndim == 1 and len(labels) == size:
        rows = by_turns(labels.tolist(), number)
    else:
        rows = list(range(min(number, size)))
    return _rows(batch, rows, size)


def _rows(batch: Any, rows: list[int], size: int) -> Any:
    if isinstance(batch, Tensor):
        is_of_rows = batch.ndim and len(batch) == size
        return batch[torch.tensor(rows)].detach().cpu() if is_of_rows else batch
    if isinstance(batch, Mapping):
        return {name: _rows(value, rows, size) for name, value in batch.items()}
    if isinstance(batch, tuple) or (isinstance(batch, list) and isinstance(batch[0], Tensor)):
        return [_rows(value, rows, size) for value in batch]
    if isinstance(batch, list) and len(batch) == size:
        return [batch[row] for row in rows]
    return batch
