"""Pictures of layers while a model trains, in tests and in predictions."""

import inspect
import re

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from matplotlib.image import imread
from torch import nn
from torch.utils.data import DataLoader, Subset

from attnkit import AttentionMaps, Interpret
from attnkit.interpret.layer_maps import draw_layers
from attnkit.lightning import UserError
from attnkit.lightning.build.renamed import current


class Images(Logger):
    """Takes images as Lightning's `WandbLogger` does, which needs wandb."""

    name = version = "images"

    def __init__(self):
        super().__init__()
        self.images = []

    def log_metrics(self, metrics, step=None): ...

    def log_hyperparams(self, *args, **kwargs): ...

    def log_image(self, *args, **kwargs):
        given = inspect.signature(WandbLogger.log_image).bind(self, *args, **kwargs).arguments
        self.images.append((given["key"], given["step"], given["images"]))


def test_draws_in_a_plain_trainer(vit, loader, trainer, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board, images = TensorBoardLogger(tmp_path, name="", version=""), Images()
    maps, interpret = AttentionMaps(num_images=3, every_n_epochs=2), Interpret(2, every_n_epochs=4)
    trained = trainer([maps, interpret], logger=[board, images], max_epochs=4)
    module = vit()
    module.class_names = [f"digit {number}" for number in range(10)]
    trained.fit(module, loader, loader)

    folder = tmp_path / "attention_maps"
    assert sorted(path.name for path in folder.iterdir()) == ["epoch_001.png", "epoch_003.png"]
    assert imread(folder / "epoch_003.png").std() > 0.1
    assert len(EventAccumulator(str(tmp_path)).Reload().Images("val/attention")) == 2
    steps = [3, 9]  # three batches an epoch
    attention = [one for one in images.images if one[0] == "val/attention"]
    assert [step for _, step, _ in attention] == steps
    assert [step for name, step, _ in images.images if name == "val/interpret"] == [3, 12]
    for name, file in (("val/attention", folder / "epoch_003.png"),
                       ("val/interpret", tmp_path / "interpret" / "epoch_004.png")):  # fmt: skip
        (pixels,) = [given for key, _, given in images.images if key == name][-1]
        assert pixels.dtype == np.uint8
        np.testing.assert_array_equal(pixels, (255 * imread(file)[..., :3]).round())


def test_one_image_of_each_class(vit, loader, trainer, tmp_path, monkeypatch):
    """The first batches of a test set that is in order hold one class only."""
    module = vit()
    module.test_step = module.validation_step
    order = loader.dataset.tensors[1].argsort(stable=True)
    in_order = DataLoader(Subset(loader.dataset, order.tolist()), batch_size=4)
    titles = []
    monkeypatch.setattr(
        "attnkit.interpret.training.attention_maps.draw_layers",
        lambda images, maps, said: titles.append(said) or draw_layers(images, maps, said),
    )
    maps = AttentionMaps(num_images=4, folder=tmp_path / "maps", rollout=True)
    trainer([maps]).test(module, in_order, verbose=False)
    (said,) = titles
    assert [title.split("\n")[0] for title in said] == [f"true: {number}" for number in range(4)]
    assert all("predicted: " in title for title in said)
    assert [path.name for path in (tmp_path / "maps").iterdir()] == ["test.png"]


def test_training_is_the_same_with_it(vit, loader, trainer):
    weights = []
    for callbacks in ([], [AttentionMaps()], [AttentionMaps(rollout=True)]):
        module = vit()
        trainer(callbacks).fit(module, loader, loader)
        weights.append(module.model.blocks[0].attention.in_proj.weight)
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_what_cannot_be_drawn_is_said_before_training(vit, classifier, loader, trainer):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    training = trainer([AttentionMaps()], num_sanity_val_steps=0)
    with pytest.raises(UserError, match="neither attention with weights nor gates"):
        training.fit(classifier(network), loader, loader)
    assert training.global_step == 0
    for options, said in (
        ({"layer": 3}, "layer: 3 is none of the 2 layers model.blocks.0.attention, model.blocks.1"),
        (
            {"num_prefix_tokens": 5},
            "AttentionMaps: grid: 17 tokens do not form a grid over an image",
        ),
        (
            {"num_prefix_tokens": 5, "rollout": True},
            "AttentionMaps: grid: 17 tokens do not form a grid",
        ),
    ):
        training = trainer([AttentionMaps(**options)])
        with pytest.raises(UserError, match=re.escape(said)):
            training.fit(vit(), loader, loader)
        assert training.global_step == 0


def test_refuses():
    with pytest.raises(ValueError, match="num_images: expected 1 or more, got 0"):
        AttentionMaps(num_images=0)


def test_the_former_name_says_the_new_one():
    with pytest.raises(
        ImportError, match=r"attnkit.lightning.AttentionMaps is attnkit.AttentionMaps"
    ):
        from attnkit.lightning import AttentionMaps as _  # noqa: F401
    assert current("attnkit.lightning.AttentionMaps") == "attnkit.AttentionMaps"
