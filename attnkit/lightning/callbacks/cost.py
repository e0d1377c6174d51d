"""What a model costs: parameters, multiply-adds, time per step."""

import statistics
import time
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities import move_data_to_device

from attnkit.core.operators.multiply_adds import count_multiply_adds


class Cost(Callback):
    """Measures what a model costs, for `results`, which `ResultsFile` writes:

    - `parameters` of the module;
    - `multiply_adds` of one forward pass on the module's `example_input_array`, if it has one
      (see `attnkit.count_multiply_adds`);
    - `step_seconds`, the median time from the end of a training step to the end of the next,
      which has its data, forward, backward and optimizer in it.
    """

    def __init__(self) -> None:
        self.results: dict[str, float] = {}
        self._seconds: list[float] = []
        self._last: float | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.results["parameters"] = sum(p.numel() for p in pl_module.parameters())
        example = pl_module.example_input_array
        if example is not None:
            inputs = move_data_to_device(example, pl_module.device)
            inputs = inputs if isinstance(inputs, tuple) else (inputs,)
            self.results["multiply_adds"] = count_multiply_adds(pl_module, *inputs)

    def _pause(self, *args: Any, **kwargs: Any) -> None:
        self._last = None

    on_train_epoch_start: Any = _pause
    on_validation_start: Any = _pause

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._seconds:
            self.results["step_seconds"] = statistics.median(self._seconds)

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seconds = list(state_dict["seconds"])
