"""A loss that is not a number ends the run before it is in the weights."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from attnkit.lightning import FiniteLoss, RunError, SafeCheckpoints
from attnkit.lightning.resume.checkpoints import load


class Late(FiniteLoss):
    """As on a GPU, where nobody waits for the loss: the look at it is before the checkpoint."""

    def on_before_backward(self, trainer, pl_module, loss):
        super().on_before_backward(trainer, pl_module, loss.to("meta"))
        self._pending = (loss.detach(), self._pending[1])


@pytest.mark.parametrize(
    ("value", "accumulate", "batch", "callback", "step"),
    [
        (float("nan"), 1, 7, FiniteLoss, 7),
        (float("-inf"), 1, 7, FiniteLoss, 7),
        (float("inf"), 2, 7, FiniteLoss, 4),
        (float("nan"), 1, 9, Late, 9),  # in the last batch of the second epoch
    ],
)
def test_stops_at_the_step_and_names_it(
    small_net, loader, make_trainer, tmp_path, value, accumulate, batch, callback, step
):
    class Diverging(small_net):
        def training_step(self, batch_, batch_idx):
            bad = self.trainer.fit_loop.total_batch_idx == batch
            if bad:
                self.before = self.head.weight.detach().clone()
            return super().training_step(batch_, batch_idx) * (value if bad else 1.0)

    module = Diverging()
    trainer = make_trainer(
        callbacks=[SafeCheckpoints(), callback(), ModelCheckpoint(tmp_path, filename="last")],
        enable_checkpointing=True,
        max_epochs=9,
        accumulate_grad_batches=accumulate,
    )
    where = f"the loss is .* at step {step}, batch {batch - 5} of epoch 2: stop"
    with pytest.raises(RunError, match=where):
        trainer.fit(module, loader)
    assert torch.equal(module.head.weight, module.before) == (callback is FiniteLoss)
    (path,) = tmp_path.glob("*.ckpt")
    checkpoint = load(path)
    assert checkpoint["global_step"] == -(-5 // accumulate)
    assert all(weight.isfinite().all() for weight in checkpoint["state_dict"].values())


def test_a_finite_run_is_left_alone(small_net, loader, make_trainer):
    trainer = make_trainer(callbacks=[FiniteLoss()])
    trainer.fit(small_net(), loader, loader)
    assert trainer.global_step == 10
