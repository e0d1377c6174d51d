import pytest
import torch
from lightning import Callback
from matplotlib.image import imread

from attnkit.lightning import LearningCurves, Throughput
from attnkit.lightning.callbacks.learning_curves import draw_curves


class Notes(Callback):
    """What validation gave, for comparison."""

    def __init__(self):
        self.losses = []

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.losses.append(trainer.callback_metrics["val/loss"].item())


def test_notes_and_draws_also_in_a_resumed_run(small_net, loader, make_trainer, tmp_path):
    path, notes = tmp_path / "pictures" / "curves.png", Notes()
    for epochs in (1, 3):
        curves = LearningCurves(path)
        trainer = make_trainer(max_epochs=epochs, callbacks=[Throughput(), curves, notes])
        resume = {} if epochs == 1 else {"ckpt_path": tmp_path / "a.ckpt", "weights_only": True}
        trainer.fit(small_net(), loader, loader, **resume)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert curves.history.keys() == {"train/loss", "val/loss", "val/accuracy"}
    assert curves.history["val/loss"] == list(zip([1, 2, 3], notes.losses, strict=True))
    assert [epoch for epoch, _ in curves.history["train/loss"]] == [1, 2, 3]
    assert len({value for _, value in curves.history["train/loss"]}) == 3
    assert imread(path).shape == (450, 1260, 4)
    assert [file.name for file in path.parent.iterdir()] == ["curves.png"]


def test_validation_within_the_epoch(small_net, digits, make_trainer, tmp_path):
    loader = torch.utils.data.DataLoader(digits, batch_size=14)
    curves = LearningCurves()
    make_trainer(callbacks=[curves], val_check_interval=2).fit(small_net(), loader, loader)
    assert [epoch for epoch, _ in curves.history["val/loss"]] == [0.5, 1, 1.5, 2]
    assert (tmp_path / "learning_curves.png").exists()


def test_drawn_when_training_fails(small_net, loader, make_trainer, tmp_path):
    class Failing(small_net):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        make_trainer(callbacks=[LearningCurves(tmp_path / "c.png")]).fit(Failing(), loader, loader)
    assert (tmp_path / "c.png").exists()


@pytest.mark.parametrize(
    ("names", "titles", "labels"),
    [
        (
            ["val/accuracy", "val/loss", "train/loss", "val/b", "val/c"],
            ["loss", "accuracy", "b", "c"],
            ["train", "val"],
        ),
        (
            ["val/loss", "train/loss", "train/plain_loss", "val/accuracy"],
            ["loss", "accuracy"],
            ["train, as minimised", "train, plain", "val"],
        ),
    ],
)
def test_loss_comes_first_and_stages_share_a_panel(names, titles, labels):
    figure = draw_curves({name: [(1.0, 0.5), (2.0, 0.25)] for name in names})
    assert [axes.get_title() for axes in figure.axes] == titles
    assert [line.get_label() for line in figure.axes[0].lines] == labels


def test_one_epoch_is_readable():
    figure = draw_curves({"train/loss": [(1.0, 0.5)]})
    figure.canvas.draw()
    (axes,) = figure.axes
    ticks = [tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    assert ticks == [1]  # neither 0 nor 2, which were not trained
