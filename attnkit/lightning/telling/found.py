"""What a run has found to train on, at its start."""

from lightning import Callback, LightningModule, Trainer

from attnkit.lightning.telling.say import say


class DataSummary(Callback):
    """Says what data there is when `fit` starts: the lines that `summary()` of the data module
    returns, if it has one, on screen and in run.log.

    attnkit's data modules tell the samples of each split and class, how uneven the classes are, and
    of images their size, channels, mean and deviation.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = getattr(trainer, "datamodule", None)
        summary = getattr(data, "summary", None)
        if callable(summary) and trainer.is_global_zero:
            for line in summary():
                say(line)
