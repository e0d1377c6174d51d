"""attnkit.lightning: what makes runs good, for anyone's `lightning.Trainer`; no Hydra needed.

This file is the public table and nothing else. Names are imported when first used, so that code
which only needs `UserError` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnkit.lightning.accumulation import ExactAccumulation
    from attnkit.lightning.attention_maps import AttentionMaps
    from attnkit.lightning.build import allowing
    from attnkit.lightning.checkpoints import CheckpointError, SafeCheckpoints, VerifiedCheckpointIO
    from attnkit.lightning.class_report import ClassReport
    from attnkit.lightning.classification import ClassificationModule
    from attnkit.lightning.cost import Cost
    from attnkit.lightning.ema import EMA
    from attnkit.lightning.errors import RunError, StoppedBySignal, UserError
    from attnkit.lightning.export import Export
    from attnkit.lightning.finite import FiniteLoss
    from attnkit.lightning.kernel_record import KernelRecord
    from attnkit.lightning.learning_curves import LearningCurves
    from attnkit.lightning.module import TaskModule
    from attnkit.lightning.optim import muon, parameter_groups, warmup_cosine
    from attnkit.lightning.program import Program
    from attnkit.lightning.results_file import ResultsFile
    from attnkit.lightning.resume import ExactResume
    from attnkit.lightning.sampler import ResumableSampler
    from attnkit.lightning.signals import SaveOnSignal
    from attnkit.lightning.throughput import Throughput

_TABLE = {
    "EMA": "ema",
    "AttentionMaps": "attention_maps",
    "CheckpointError": "checkpoints",
    "ClassReport": "class_report",
    "ClassificationModule": "classification",
    "Cost": "cost",
    "ExactAccumulation": "accumulation",
    "ExactResume": "resume",
    "Export": "export",
    "FiniteLoss": "finite",
    "KernelRecord": "kernel_record",
    "LearningCurves": "learning_curves",
    "Program": "program",
    "ResultsFile": "results_file",
    "ResumableSampler": "sampler",
    "RunError": "errors",
    "SafeCheckpoints": "checkpoints",
    "SaveOnSignal": "signals",
    "StoppedBySignal": "errors",
    "TaskModule": "module",
    "Throughput": "throughput",
    "UserError": "errors",
    "VerifiedCheckpointIO": "checkpoints",
    "allowing": "build",
    "muon": "optim",
    "parameter_groups": "optim",
    "warmup_cosine": "optim",
}

__all__ = [
    "EMA",
    "AttentionMaps",
    "CheckpointError",
    "ClassReport",
    "ClassificationModule",
    "Cost",
    "ExactAccumulation",
    "ExactResume",
    "Export",
    "FiniteLoss",
    "KernelRecord",
    "LearningCurves",
    "Program",
    "ResultsFile",
    "ResumableSampler",
    "RunError",
    "SafeCheckpoints",
    "SaveOnSignal",
    "StoppedBySignal",
    "TaskModule",
    "Throughput",
    "UserError",
    "VerifiedCheckpointIO",
    "allowing",
    "muon",
    "parameter_groups",
    "warmup_cosine",
]


def __getattr__(name: str):
    if name not in _TABLE:
        raise AttributeError(f"module 'attnkit.lightning' has no attribute {name!r}")
    value = getattr(import_module(f"attnkit.lightning.{_TABLE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_TABLE])
