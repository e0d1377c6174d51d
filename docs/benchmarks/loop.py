"""What the parts of a run cost: processor time of an epoch by callback, logging and the rest.

    OMP_NUM_THREADS=1 python docs/benchmarks/loop.py task=graph model=gat data=planetoid \
        data.root=ROOT data.name=Cora trainer.max_epochs=200

The arguments are those of `attnkit`, of a run in one process. Each part counts without the parts
that it calls: the step is forward, backward and optimizer; of holding the best checkpoint, what
other callbacks put into it is theirs. What is drawn or written at the end is spread over the
epochs. "over": more than 15 % of the step.
"""

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from lightning import Callback, Trainer
from measure import machine, table

from attnkit.launch.main import main
from attnkit.lightning import ClassificationModule

BAR = 0.15
HOOKS = [name for name in dir(Callback) if name.startswith("on_")]


class Parts:
    """Processor seconds of the functions that it wraps, each without the wrapped ones in it."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = 0.0

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._open.append(name)
            self.calls[name] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._open.pop()

        return wrapped

    def _switch(self) -> None:
        now = time.process_time()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = time.process_time()


def watch(parts: Parts, trainer: Trainer, module: ClassificationModule) -> None:
    """Wrap the parts of a fit."""
    for callback in trainer.callbacks:
        for hook in HOOKS:
            if getattr(type(callback), hook) is not getattr(Callback, hook):
                name = type(callback).__name__
                setattr(callback, hook, parts.wrap(name, getattr(callback, hook)))
    for logger in trainer.loggers:
        logger.log_metrics = parts.wrap(type(logger).__name__, logger.log_metrics)
    for name, method in {
        "step": "training_step", "validation": "validation_step", "metrics": "evaluate",
        "metrics ": "log_train_loss", "self.log": "log",
    }.items():  # fmt: skip
        setattr(module, method, parts.wrap(name.strip(), getattr(module, method)))
    trainer.strategy.optimizer_step = parts.wrap("step", trainer.strategy.optimizer_step)


def report(parts: Parts, epochs: int) -> str:
    step = parts.seconds["step"]
    rows = [
        {
            "part": name,
            "ms an epoch": f"{1e3 * seconds / epochs:.2f}",
            "of the step": f"{seconds / step:.0%}",
            "": "over" if seconds > BAR * step and name != "step" else "",
        }
        for name, seconds in parts.seconds.most_common()
    ]
    return table(rows)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    fit, parts = Trainer.fit, Parts()

    def watched(trainer: Trainer, module: ClassificationModule, *args: Any, **kwargs: Any) -> None:
        with torch.autograd.set_multithreading_enabled(False):
            watch(parts, trainer, module)
            parts.wrap("Lightning's loops", fit)(trainer, module, *args, **kwargs)
        print(machine(), report(parts, max(1, trainer.current_epoch)), sep="\n\n")

    Trainer.fit = watched  # type: ignore[method-assign]
    main(sys.argv[1:])
