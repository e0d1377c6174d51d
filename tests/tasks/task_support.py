"""What tests of the tasks share."""

from lightning import Trainer

_SILENT = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


def quiet(folder=".", **options):
    """A trainer on the CPU that prints and writes nothing, unless the options say so."""
    silent = {**dict.fromkeys(_SILENT, False), "num_sanity_val_steps": 0}
    return Trainer(accelerator="cpu", default_root_dir=folder, **{**silent, **options})
