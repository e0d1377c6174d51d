"""attnkit.lightning: modules, callbacks and checkpoints for any `lightning.Trainer`, without Hydra.

This file is the public table and nothing else. Type checkers run the imports below; Python does one
when its name is first used, so that code which only needs `UserError` does not wait for torch.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnkit.lightning.build.build import allowing
    from attnkit.lightning.callbacks.accumulation import ExactAccumulation
    from attnkit.lightning.callbacks.cached_features import CachedFeatures
    from attnkit.lightning.callbacks.class_report import ClassReport
    from attnkit.lightning.callbacks.cost import Cost
    from attnkit.lightning.callbacks.ema import EMA
    from attnkit.lightning.callbacks.finite import FiniteLoss
    from attnkit.lightning.callbacks.kernel_record import KernelRecord
    from attnkit.lightning.callbacks.learning_curves import LearningCurves
    from attnkit.lightning.callbacks.predictions import PredictionsFile
    from attnkit.lightning.callbacks.progress import Progress
    from attnkit.lightning.callbacks.pruning import Pruning
    from attnkit.lightning.callbacks.results_file import ResultsFile
    from attnkit.lightning.callbacks.throughput import Throughput
    from attnkit.lightning.described import DescribedData
    from attnkit.lightning.errors import RunError, StoppedBySignal, UserError
    from attnkit.lightning.explained import Explained
    from attnkit.lightning.export.export import Export
    from attnkit.lightning.export.program import Program
    from attnkit.lightning.loggers import MetricsCSV, TensorBoard, WandbRun
    from attnkit.lightning.modules.classification import ClassificationModule
    from attnkit.lightning.modules.module import TaskModule
    from attnkit.lightning.modules.optim import muon
    from attnkit.lightning.modules.parameter_groups import parameter_groups, scale_learning_rates
    from attnkit.lightning.modules.schedules import (
        Plateau,
        warmup_cosine,
        warmup_polynomial,
        warmup_step,
    )
    from attnkit.lightning.resume.best_and_last import BestCheckpoint, LastCheckpoint
    from attnkit.lightning.resume.checkpoints import (
        CheckpointError,
        SafeCheckpoints,
        VerifiedCheckpointIO,
    )
    from attnkit.lightning.resume.exact_resume import ExactResume
    from attnkit.lightning.resume.sampler import ResumableSampler
    from attnkit.lightning.resume.signals import SaveOnSignal
    from attnkit.lightning.resume.warm_start import warm_start
    from attnkit.lightning.telling.epochs import EpochLines
    from attnkit.lightning.telling.found import DataSummary
    from attnkit.lightning.telling.steps import StepMetrics

# Where each name is, read from these imports, so that it is written once.
_HOMES = {
    name.name: node.module
    for block in ast.parse(Path(__file__).read_bytes()).body
    for node in getattr(block, "body", [])
    if isinstance(node, ast.ImportFrom) and node.module
    for name in node.names
}
__all__ = [*_HOMES]


def __getattr__(name: str):
    if name not in _HOMES:
        from attnkit.lightning.build.renamed import current

        if (today := current(f"attnkit.lightning.{name}")) != f"attnkit.lightning.{name}":
            raise ImportError(f"attnkit.lightning.{name} is {today} now")
        raise AttributeError(f"module 'attnkit.lightning' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
