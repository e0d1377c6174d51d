"""The callback that ends a trial of a study early if the pruner decides so."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

from attnkit.lightning.files import replacing
from attnkit.lightning.study import PRUNED, make_pruner, open_study


class Pruning(Callback):
    """Reports the metric to an Optuna study after each epoch; its pruner may end the trial.

    A pruned trial ends with `optuna.TrialPruned` and the file pruned.txt in its folder. A
    trial that the study does not count as running, such as a retried one, is not reported.

    Args:
        folder: run folder.
        storage: file of a journal, or a URL of Optuna.
        study: name of the study in the storage.
        trial: number of the trial in the study.
        monitor: metric to report.
        pruner: name of the pruner: median, percentile, successive_halving, hyperband, threshold.
        options: arguments of Optuna's class.

    Raises:
        UserError: the study does not exist.
    """

    def __init__(
        self,
        folder: str | Path,
        storage: str,
        study: str,
        trial: int,
        monitor: str,
        pruner: str = "median",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.monitor = Path(folder), monitor
        self.pruner, self.trial = make_pruner(pruner, options), trial
        self._study = open_study(storage, study)
        self._study.pruner = self.pruner

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the metric; end the trial on every rank if the pruner decides so."""
        pruned = self._report(trainer) if trainer.is_global_zero else ""
        if pruned := trainer.strategy.broadcast(pruned):
            from optuna import TrialPruned

            if trainer.is_global_zero:
                with replacing(self.folder / PRUNED) as file:
                    file.write(f"{pruned}\n".encode())
            raise TrialPruned(pruned)

    def _report(self, trainer: Trainer) -> str:
        import optuna

        value = trainer.callback_metrics.get(self.monitor)
        if value is None or not math.isfinite(float(value)):
            return ""
        frozen = self._study.get_trials(deepcopy=False)[self.trial]
        if frozen.state.is_finished():
            return ""
        trial = optuna.Trial(self._study, frozen._trial_id)
        epoch = trainer.current_epoch
        if epoch not in frozen.intermediate_values:  # an epoch may be trained again
            trial.report(float(value), epoch)
        if not trial.should_prune():
            return ""
        return f"pruned after epoch {epoch + 1}: {self.monitor} {float(value):.5g}"
