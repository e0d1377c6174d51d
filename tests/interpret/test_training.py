"""`Interpret`: maps and scores while a model trains and in its test."""

import inspect
import re
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import FSDPStrategy
from matplotlib.image import imread
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import attnkit
from attnkit import Interpret
from attnkit.interpret.training import draw_history
from attnkit.lightning import MetricsCSV, UserError
from attnkit.lightning.protocols import Explained
from attnkit.models.captioning.word_decoder import END, PAD


class Classifier(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


@pytest.fixture
def vit():
    """Makes the same small ViT each time."""

    def made():
        torch.manual_seed(0)
        options = {"dim": 12, "depth": 2, "num_heads": 3, "dropout_p": 0.1, "num_classes": 10}
        return Classifier(attnkit.ViT(image_size=8, patch_size=2, in_channels=1, **options))

    return made


@pytest.fixture(scope="session")
def loader():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images[:55], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return DataLoader(TensorDataset(images, torch.tensor(labels[:55])), batch_size=20)


@pytest.fixture
def trainer(tmp_path):
    def made(callbacks, **options):
        options = {"max_epochs": 3, "logger": False, "enable_checkpointing": False,
                   "num_sanity_val_steps": 0} | options  # fmt: skip
        return lightning.Trainer(
            accelerator="cpu", default_root_dir=tmp_path, enable_progress_bar=False,
            enable_model_summary=False, callbacks=callbacks, **options,
        )  # fmt: skip

    return made


def test_scores_and_pictures_go_to_every_logger(vit, loader, trainer, tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoardLogger(tmp_path, name="", version="")
    table = MetricsCSV(tmp_path)
    interpret = Interpret(num_images=4, every_n_epochs=2)
    trained = trainer([interpret], logger=[board, table], max_epochs=4, num_sanity_val_steps=1)
    trained.fit(vit(), loader, loader)
    said = capsys.readouterr().out

    names = sorted(path.name for path in (tmp_path / "interpret").iterdir())
    assert names == ["epoch_001.png", "epoch_003.png", "epoch_004.png", "scores.png"]
    assert all(imread(tmp_path / "interpret" / name).std() > 0.1 for name in names)
    scores = {"gap", "random", "gap_centre", "gap_input_gradient", "class_sensitivity"}
    expected = {f"interpret_{name}" for name in scores | {"prefix_share"}}
    assert set(interpret.history) == expected
    assert all([epoch for epoch, _ in points] == [1, 3, 4] for points in interpret.history.values())
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Images("val/interpret")) == 3
    seen = [event.value for event in events.Scalars("val/interpret_gap")]
    assert seen == pytest.approx([value for _, value in interpret.history["interpret_gap"]])
    assert "val/interpret_gap" in (tmp_path / "metrics.csv").read_text()
    cost = r"interpret: relevance of 4 images, .+ each time; 3 times, "
    cost += r"(about \d+ s|less than a second)\n"
    assert len(re.findall(cost, said)) == 1
    assert re.search(r"interpret: \d+\.\d s, \d+\.\d % of the training; .*scores\.png", said)


def test_the_scores_are_those_of_trust(vit, loader, trainer, tmp_path):
    interpret, module = Interpret(num_images=5, folder=tmp_path / "maps"), vit()
    trainer([interpret], max_epochs=1).fit(module, loader, loader)
    images = loader.dataset.tensors[0][:5]  # 0, 1, 2, 3, 4: of as many classes
    seen = attnkit.explain(module, images)
    trust = seen.trust(removals=["mask"], full=False)
    score = trust["gap in p, tokens masked"]
    assert interpret.history["interpret_gap"] == [(1, pytest.approx(score.map, abs=1e-6))]
    assert interpret.history["interpret_random"] == [(1, pytest.approx(score.within, abs=1e-6))]
    assert interpret.history["interpret_gap_centre"] == [(1, pytest.approx(score.centre, abs=1e-6))]
    share = float(seen.share.mean())
    assert interpret.history["interpret_prefix_share"] == [(1, pytest.approx(share, abs=1e-6))]


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


def test_a_layer_is_drawn_without_scores(vit, loader, trainer, tmp_path):
    """In validation and test; loggers of both kinds of Lightning's get the pixels of the file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board, images = TensorBoardLogger(tmp_path, name="", version=""), Images()
    interpret = Interpret(num_images=3, every_n_epochs=2, trust="none", layer=-1)
    trained = trainer([interpret], logger=[board, images], max_epochs=4)
    module = vit()
    module.test_step = module.validation_step
    trained.fit(module, loader, loader)
    trained.test(module, loader, verbose=False)

    folder = tmp_path / "interpret"
    names = ["epoch_001.png", "epoch_003.png", "epoch_004.png", "test.png"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert not interpret.history
    assert len(EventAccumulator(str(tmp_path)).Reload().Images("val/interpret")) == 3
    steps = [3, 9, 12]  # three batches an epoch
    assert [one[1] for one in images.images if one[0] == "val/interpret"] == steps
    for key, file in (("val/interpret", "epoch_004.png"), ("test/interpret", "test.png")):
        (pixels,) = [given for name, _, given in images.images if name == key][-1]
        assert pixels.dtype == np.uint8
        assert pixels.std() > 10
        np.testing.assert_array_equal(pixels, (255 * imread(folder / file)[..., :3]).round())


@pytest.mark.parametrize("options", [{"method": "rollout"}, {"layer": "*"}], ids=str)
def test_without_scores_nothing_is_removed(vit, loader, trainer, tmp_path, monkeypatch, options):
    def fails(*_, **__):
        raise AssertionError("judged")

    monkeypatch.setattr("attnkit.interpret.units.trust", fails)
    interpret = Interpret(2, 1, trust="none", folder=tmp_path / "maps", **options)
    trainer([interpret], max_epochs=1).fit(vit(), loader, loader)
    assert [path.name for path in (tmp_path / "maps").iterdir()] == ["epoch_001.png"]


class Binary(Classifier):
    """One logit: is the digit odd?"""

    def training_step(self, batch, batch_idx):
        return F.binary_cross_entropy_with_logits(self(batch[0])[:, 0], (batch[1] % 2).float())

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))


def test_a_single_logit_has_no_class_to_be_sensitive_to(loader, trainer, tmp_path):
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(128, 1),
    )  # fmt: skip
    interpret = Interpret(2, folder=tmp_path / "maps")
    trainer([interpret], max_epochs=1).fit(Binary(network), loader, loader)
    gaps = {f"interpret_{name}" for name in ("gap", "random", "gap_centre", "gap_input_gradient")}
    assert set(interpret.history) == gaps


@pytest.mark.parametrize("quantity", ["p", "the logit"])
def test_the_axis_says_whose_gap_it_is(quantity):
    figure = draw_history({"interpret_gap": [(1, 0.2), (3, 0.4)]}, quantity)
    assert figure.axes[0].get_ylabel() == f"gap in {quantity}"


def test_of_as_many_classes_as_the_batch_has(vit, trainer, tmp_path):
    """Seven images of three classes in order: one of each before a second of any."""
    images, labels = torch.rand(7, 1, 8, 8), torch.tensor([4, 4, 4, 4, 1, 1, 9])
    interpret = Interpret(4, trust="none", folder=tmp_path / "maps")
    loader = DataLoader(TensorDataset(images, labels), batch_size=7)
    trainer([interpret]).validate(vit(), loader, verbose=False)
    assert interpret._batch[1].tolist() == [1, 4, 9, 1]
    assert torch.equal(interpret._batch[0], images[[4, 0, 6, 5]])


def test_training_is_the_same_with_it_and_after_a_resumption(vit, loader, trainer, tmp_path):
    """Weights bit for bit: no random number, gradient or mode is touched, dropout included."""

    def fitted(interpret, max_epochs=2, checks=0, **options):
        module = vit()
        trained = trainer(
            [interpret] if interpret else [], max_epochs=max_epochs, num_sanity_val_steps=checks,
            limit_train_batches=2, limit_val_batches=1,
        )  # fmt: skip
        trained.fit(module, loader, loader, **options)
        return module, trained

    first, again = (Interpret(num_images=2, every_n_epochs=1) for _ in "12")
    plain, looked = fitted(None)[0], fitted(first, checks=1)[0]
    early, half = fitted(Interpret(num_images=2, every_n_epochs=1), max_epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = [fitted(one, ckpt_path=tmp_path / "half.ckpt")[0] for one in (None, again)]
    drawn = fitted(Interpret(num_images=2, trust="none", layer="*"), max_epochs=1)[0]
    for one, other in ((plain, looked), (early, drawn), resumed):
        for name, value in one.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name
    assert [epoch for epoch, _ in again.history["interpret_gap"]] == [1, 2]
    assert again.history["interpret_gap"][0] == first.history["interpret_gap"][0]


def test_a_network_with_channel_attention_has_maps_of_the_image(loader, trainer, tmp_path):
    """64 channels are no 8 x 8 positions."""
    network = nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), attnkit.ChannelAttention(64), nn.AdaptiveAvgPool2d(4),
        nn.Conv2d(64, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    interpret = Interpret(num_images=2, folder=tmp_path / "maps")
    trainer([interpret], max_epochs=1).fit(Classifier(network), loader, loader)
    assert interpret._look == ("grad_cam", "mean")


class Captions(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        encoder = attnkit.ViTEncoder((8, 12), dim=16, depth=1, num_heads=2, patch_size=2)
        self.model = attnkit.Captioner(encoder, attnkit.TransformerDecoder(23, 7, dim=16))

    def explained(self, batch):
        said = torch.tensor([[7, 9, END], [5, END, PAD]])
        names = [["a", "cat", "<end>"], ["dogs", "<end>"]]
        images = batch["image"]
        return Explained(self.model, images, images, sentences=said, words=names)

    def validation_step(self, batch, batch_idx):
        pass


def test_captions(trainer, tmp_path):
    module = Captions()
    batch = {"image": torch.rand(2, 3, 8, 12), "references": [["a cat"], ["dogs"]]}
    interpret = Interpret(folder=tmp_path / "maps")
    loader = DataLoader([batch], batch_size=None)
    trainer([interpret]).validate(module, loader, verbose=False)
    words = [w for s in attnkit.explain(module, batch["image"], module.explained(batch).sentences)
             .trust_words().scores for w in s]  # fmt: skip
    gap = sum(word.gap for word in words) / 5
    assert interpret.history["interpret_gap"] == [(1, pytest.approx(gap, abs=1e-6))]
    assert (tmp_path / "maps" / "epoch_001.png").exists()


def test_a_layer_of_a_captioner(trainer, tmp_path):
    module, interpret = Captions(), Interpret(trust="none", layer=0, folder=tmp_path / "maps")
    loader = DataLoader([{"image": torch.rand(2, 3, 8, 12)}], batch_size=None)
    trainer([interpret]).validate(module, loader, verbose=False)
    assert (tmp_path / "maps" / "epoch_001.png").exists()
    with pytest.raises(UserError, match="Interpret: layers: 4 is none of the 4 attention layers"):
        trainer([Interpret(trust="none", layer=4)]).validate(module, loader, verbose=False)


def test_a_layer_that_cannot_be_drawn_is_said_before_training(vit, loader, trainer):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = trainer([Interpret(trust="none", layer=-1)])
    with pytest.raises(UserError, match="layer: Classifier has neither attention with weights nor"):
        before.fit(Classifier(network), loader, loader)
    assert before.global_step == 0
    said = "Interpret: layer: 3 is none of the 2 layers model.blocks.0.attention, model.blocks.1"
    with pytest.raises(UserError, match=re.escape(said)):
        trainer([Interpret(trust="none", layer=3)]).fit(vit(), loader, loader)
    for options in ({}, {"trust": "none", "method": "rollout"}):
        with pytest.raises(ValueError, match="layer: -1 is drawn without a method and scores"):
            Interpret(layer=-1, **options)
    with pytest.raises(ValueError, match="trust: expected 'fast', 'full' or 'none', got 'some'"):
        Interpret(trust="some")


def test_what_it_does_not_show_is_refused_before_training(vit, loader, trainer):
    module = vit()
    with pytest.raises(
        UserError, match="Interpret: method: expected one of attention, value_weighted"
    ):
        trainer([Interpret(method="rollot")], num_sanity_val_steps=1).fit(module, loader, loader)
    module.explained = lambda batch: Explained(module, (batch[0], None))
    with pytest.raises(UserError, match="Interpret: expected images or captions, got a graph"):
        trainer([Interpret()], num_sanity_val_steps=1).fit(module, loader, loader)
    texts = DataLoader(TensorDataset(torch.rand(4, 3), torch.ones(4).long()))
    with pytest.raises(UserError, match="Interpret: expected a batch that begins with images"):
        trainer([Interpret()]).validate(Texts(), texts)
    sharded = SimpleNamespace(strategy=object.__new__(FSDPStrategy))
    with pytest.raises(UserError, match="Interpret: expected a strategy that keeps all weights"):
        Interpret().setup(sharded, module, "fit")
    with pytest.raises(ValueError, match="every_n_epochs: expected at least 1, got 0"):
        Interpret(every_n_epochs=0)


class Texts(lightning.LightningModule):
    def validation_step(self, batch, batch_idx):
        pass
