"""A loss that is not a number ends the run before it is in the weights."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from attnkit.lightning import FiniteLoss, RunError, SafeCheckpoints
from attnkit.lightning.resume.checkpoints import load


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_stops_at_the_step_and_names_it(
    small_net, loader, make_trainer, tmp_path, value, accumulate
):
    class Diverging(small_net):
        def training_step(self, batch, batch_idx):
            bad = self.trainer.fit_loop.total_batch_idx == 7
            if bad:
                self.before = self.head.weight.detach().clone()
            return super().training_step(batch, batch_idx) * (value if bad else 1.0)

    module = Diverging()
    trainer = make_trainer(
        callbacks=[SafeCheckpoints(), FiniteLoss(), ModelCheckpoint(tmp_path, filename="last")],
        enable_checkpointing=True,
        max_epochs=9,
        accumulate_grad_batches=accumulate,
    )
    step = {1: 7, 2: 4}[accumulate]
    with pytest.raises(RunError, match=f"the loss is .* at step {step}, batch 2 of epoch 2: stop"):
        trainer.fit(module, loader)
    assert torch.equal(module.head.weight, module.before)
    (path,) = tmp_path.glob("*.ckpt")
    assert all(weight.isfinite().all() for weight in load(path)["state_dict"].values())


def test_a_late_look_is_before_the_next_checkpoint(small_net, loader, make_trainer, tmp_path):
    """As on a GPU, where nobody waits for the loss."""

    class Late(FiniteLoss):
        def on_before_backward(self, trainer, pl_module, loss):
            super().on_before_backward(trainer, pl_module, loss.to("meta"))
            self._pending = (loss.detach(), self._pending[1])

    class Diverging(small_net):
        def training_step(self, batch, batch_idx):
            bad = self.trainer.fit_loop.total_batch_idx == 9  # the last of the second epoch
            return super().training_step(batch, batch_idx) * (float("nan") if bad else 1.0)

    trainer = make_trainer(
        callbacks=[SafeCheckpoints(), Late(), ModelCheckpoint(tmp_path, filename="last")],
        enable_checkpointing=True,
        max_epochs=9,
    )
    with pytest.raises(RunError, match="at step 9, batch 4 of epoch 2"):
        trainer.fit(Diverging(), loader)
    (path,) = tmp_path.glob("*.ckpt")
    assert load(path)["global_step"] == 5


def test_a_finite_run_is_left_alone(small_net, loader, make_trainer):
    trainer = make_trainer(callbacks=[FiniteLoss()])
    trainer.fit(small_net(), loader, loader)
    assert trainer.global_step == 10
