"""Features of a frozen network, computed once."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

import attnkit
from attnkit.finetune import head_only
from attnkit.lightning import CachedFeatures
from attnkit.lightning.callbacks import cached_features
from attnkit.tasks.graphs import NodeClassification
from attnkit.tasks.image_classification import DigitsData, ImageClassification


class Counting(attnkit.ViT):
    """Counts the images that its blocks see in training."""

    def __init__(self):
        super().__init__(
            image_size=8, patch_size=4, in_channels=1, num_classes=10, dim=24, depth=2,
            num_heads=2, dropout_p=0.3, drop_path=0.3,
        )  # fmt: skip
        self.seen = 0

    def features(self, images):
        self.seen += len(images)
        return super().features(images)


@pytest.fixture
def fit(make_trainer, caplog):
    def run(network=None, cache=True, epochs=3, data=None, **options):
        torch.manual_seed(0)
        network = network or Counting()
        finetune = partial(head_only, cache=cache)
        optimizer = partial(torch.optim.AdamW, lr=0.05)
        module = ImageClassification(
            network, optimizer, finetune=finetune, num_classes=10, in_channels=1, mean=[0.3],
            std=[0.3], **options,
        )  # fmt: skip
        data = data or DigitsData(augment=None, batch_size=64)
        trainer = make_trainer(max_epochs=epochs, num_sanity_val_steps=0)
        caplog.clear()
        with caplog.at_level("INFO"):
            trainer.fit(module, data)
        said = [r.getMessage() for r in caplog.records if r.name == cached_features.__name__]
        return module, trainer, said

    return run


def test_an_epoch_after_the_first_computes_no_features_and_trains_the_same(fit):
    module, trainer, said = fit()
    assert said == ["finetune=head: features are computed once for each sample, and kept"]
    assert module.model.seen < 1797 * 0.9 * 1.3  # train and val once, in whole chunks
    plain, other, quiet = fit(cache=False)
    assert quiet == []
    assert plain.model.seen > 3 * 1400
    assert "forward" not in vars(module.model)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=1e-3, atol=1e-4)
    assert trainer.callback_metrics["val/accuracy"] > 0.5
    for name in ("val/loss", "val/accuracy"):
        torch.testing.assert_close(trainer.callback_metrics[name], other.callback_metrics[name],
                                   rtol=1e-3, atol=1e-3)  # fmt: skip


class Noisy(DigitsData):
    """Draws, and does not say so."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        images, labels = super().on_after_batch_transfer(batch, dataloader_idx)
        return images + torch.randint_like(images, 9), labels


class Twice(Counting):
    """Its output is not its head's."""

    def forward(self, images):
        return 2 * super().forward(images)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"mixup": 0.2}, "module.mixup or cutmix mixes the samples"),
        ({"data": DigitsData(augment=nn.Identity())}, "the data are augmented; data.augment=null"),
        ({"data": Noisy(augment=None)}, "no sample occurred twice"),
        ({"network": Twice()}, "the network's output is not its head's"),
    ],
)
def test_where_they_can_not_be_kept_training_goes_on_without(fit, arguments, reason):
    module, trainer, said = fit(**arguments, epochs=3)
    assert f"finetune=head: features are computed again in every epoch: {reason}" in said[-1]
    assert "forward" not in vars(module.model)
    assert trainer.current_epoch == 3
    callback = next(c for c in trainer.callbacks if isinstance(c, CachedFeatures))
    assert not callback._features.num_kept
    assert module.model.seen > 3 * 1400


def test_another_task_says_that_it_keeps_none(make_trainer, caplog):
    network = attnkit.GAT(in_channels=3, hidden_channels=4, num_classes=5, num_layers=2, heads=2)
    edges, labels = torch.randint(7, (2, 20)), torch.arange(7) % 5
    nodes = Data(torch.randn(7, 3), edges, y=labels, train_mask=labels > 0)
    module = NodeClassification(network, num_classes=5, finetune=partial(head_only, cache=True))
    with caplog.at_level("INFO"):
        make_trainer(max_epochs=1).fit(module, DataLoader([nodes], batch_size=None))
    said = [r.getMessage() for r in caplog.records if r.name == cached_features.__name__]
    assert said == [
        "finetune=head: features are computed again in every epoch: the network is not called with "
        "one tensor of samples"
    ]
