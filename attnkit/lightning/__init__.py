"""attnkit.lightning: modules, callbacks and checkpoints for any `lightning.Trainer`, without Hydra.

This file is the public table and nothing else. Type checkers run the imports below; Python runs one
when its name is first used, so that code which only needs `UserError` does not wait for torch.
"""

from typing import TYPE_CHECKING

from attnkit.core.names import lazy

if TYPE_CHECKING:
    from attnkit.lightning.build import allowing
    from attnkit.lightning.callbacks.cached_features import CachedFeatures
    from attnkit.lightning.callbacks.distillation import Distillation
    from attnkit.lightning.callbacks.ema import EMA
    from attnkit.lightning.callbacks.kernel_record import KernelRecord
    from attnkit.lightning.callbacks.learning_curves import LearningCurves
    from attnkit.lightning.callbacks.loss import ExactAccumulation, FiniteLoss
    from attnkit.lightning.callbacks.meter import Cost, Meter, StepMetrics, Throughput
    from attnkit.lightning.callbacks.progress import DataSummary, EpochLines, Progress
    from attnkit.lightning.callbacks.pruning import Pruning
    from attnkit.lightning.callbacks.reports import ClassReport, ValueReport
    from attnkit.lightning.callbacks.results import PredictionsFile, ResultsFile
    from attnkit.lightning.errors import RunError, StoppedBySignal, UserError
    from attnkit.lightning.export import Export, Program
    from attnkit.lightning.loggers import MetricsCSV, TensorBoard, WandbRun
    from attnkit.lightning.modules.classification import ClassificationModule
    from attnkit.lightning.modules.module import TaskModule
    from attnkit.lightning.modules.optim import (
        Plateau,
        muon,
        parameter_groups,
        scale_learning_rates,
        warmup_cosine,
        warmup_polynomial,
        warmup_step,
    )
    from attnkit.lightning.protocols import DescribedData, Explained
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
else:
    __getattr__, __dir__ = lazy(__name__)
