import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint

from attnkit.lightning import EMA


class Weights(Callback):
    """The head's weights after each step, and in the test."""

    def __init__(self):
        self.trained = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.trained.append(pl_module.head.weight.detach().double())

    def on_test_start(self, trainer, pl_module):
        self.tested = pl_module.head.weight.detach().clone()


def test_is_the_average(small_net, loader, make_trainer):
    weights = Weights()
    module = small_net()
    make_trainer(callbacks=[weights, EMA(decay=0.3)], max_epochs=3).fit(module, loader)
    average = weights.trained[0]
    for n, trained in enumerate(weights.trained[1:], start=1):
        decay = min(0.3, (1 + n) / (10 + n))
        average = decay * average + (1 - decay) * trained
    torch.testing.assert_close(module.head.weight.double(), average, rtol=0, atol=1e-6)
    assert not torch.allclose(average, weights.trained[-1], atol=1e-4)


@pytest.mark.parametrize(
    ("callback", "tests_the_average"), [(EMA(0.9), True), (EMAWeightAveraging(decay=0.9), False)]
)
def test_the_best_checkpoint_is_tested_as_it_was_validated(
    small_net, loader, make_trainer, tmp_path, callback, tests_the_average
):
    # The second row is Lightning's own, and why ours is there; when it fails, ours can go.
    weights = Weights()
    best = ModelCheckpoint(tmp_path, monitor="val/loss")
    trainer = make_trainer(callbacks=[callback, best, weights], enable_checkpointing=True)
    module = small_net()
    trainer.fit(module, loader, loader)
    trainer.test(module, loader, ckpt_path="best", weights_only=True, verbose=False)
    checkpoint = torch.load(best.best_model_path, weights_only=True)
    average, trained = (
        checkpoint[key]["head.weight"] for key in ("state_dict", "current_model_state")
    )
    assert not torch.equal(average, trained)
    assert torch.equal(weights.tested, average if tests_the_average else trained)
    tested_loss = trainer.callback_metrics["test/loss"].item()
    assert (tested_loss == pytest.approx(best.best_model_score.item())) is tests_the_average


def test_an_error_in_validation_saves_both_weights_in_their_places(
    small_net, loader, make_trainer, tmp_path
):
    class Failing(small_net):
        def validation_step(self, batch, batch_idx):
            if self.global_step:
                raise RuntimeError("on purpose")

    weights = Weights()
    callbacks = [EMA(0.9), weights, OnExceptionCheckpoint(tmp_path)]
    with pytest.raises(RuntimeError, match="on purpose"):
        make_trainer(callbacks=callbacks, enable_checkpointing=True).fit(Failing(), loader, loader)
    (path,) = tmp_path.glob("*.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    trained = checkpoint["current_model_state"]["head.weight"]
    assert torch.equal(trained.double(), weights.trained[-1])
    assert not torch.equal(checkpoint["state_dict"]["head.weight"], trained)


def test_integers_are_copied(small_net, loader, make_trainer):
    class Counting(small_net):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.tensor(0))

        def training_step(self, batch, batch_idx):
            self.steps += 1
            return super().training_step(batch, batch_idx)

    module = Counting()
    make_trainer(callbacks=[EMA()]).fit(module, loader)
    assert module.steps == 10
    with pytest.raises(ValueError, match="decay: expected 0 <= decay < 1, got 1"):
        EMA(decay=1)
