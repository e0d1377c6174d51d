import time

import pytest
import torch
from lightning import Callback

from attnkit.lightning import Cost


@pytest.fixture
def clocked(small_net, monkeypatch):
    """A module on whose clock a training step takes 2 s, every fifth 30 s, validation 100 s."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Clocked(small_net):
        def training_step(self, batch, batch_idx):
            now[0] += 2.0 if batch_idx % 5 else 30.0
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            now[0] += 100.0
            super().validation_step(batch, batch_idx)

    return Clocked()


@pytest.mark.parametrize(("val_check_interval", "steps"), [(1.0, 8), (2, 4)])
def test_parameters_and_the_time_of_a_step(
    clocked, loader, make_trainer, val_check_interval, steps
):
    cost = Cost()
    trainer = make_trainer(callbacks=[cost], val_check_interval=val_check_interval)
    trainer.fit(clocked, loader, loader)
    assert cost.results["parameters"] == sum(p.numel() for p in clocked.parameters())
    assert cost.state_dict()["seconds"] == [2.0] * steps  # neither validation nor a first batch's
    assert cost.results["step_seconds"] == 2.0
    assert "multiply_adds" not in cost.results  # the module has no example


def test_multiply_adds_of_the_example(small_net, loader, digits, make_trainer):
    cost, module = Cost(), small_net()
    module.example_input_array = digits[0][0][None]
    modes = [m.training for m in module.modules()]
    make_trainer(callbacks=[cost], max_epochs=1).fit(module, loader)
    patches, attention, head = 16 * 12 * 4, 16 * 12 * (36 + 12) + 3 * 16 * 16 * (4 + 4), 12 * 10
    assert cost.results["multiply_adds"] == patches + attention + head
    assert modes == [m.training for m in module.modules()]


def test_the_example_changes_nothing_of_training(small_net, loader, digits, make_trainer):
    def trained(callbacks):
        torch.manual_seed(0)
        module = small_net()
        module.example_input_array = digits[0][0][None]
        make_trainer(callbacks=callbacks, max_epochs=1).fit(module, loader)
        return module.state_dict()

    torch.testing.assert_close(trained([Cost()]), trained([Callback()]), rtol=0, atol=0)
