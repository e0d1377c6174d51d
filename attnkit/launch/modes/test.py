"""`run=test`: tests a checkpoint on the test data."""

from __future__ import annotations

from attnkit.launch.run import Run
from attnkit.lightning.callbacks.meter import measured


def test(run: Run) -> dict[str, float]:
    """Test the checkpoint."""
    run.make_own_data()
    run.make_module()
    trainer = run.make_trainer()
    run.ready()
    run.loaded(trainer.test, ckpt_path=run.ckpt, verbose=False)
    return measured(trainer)
