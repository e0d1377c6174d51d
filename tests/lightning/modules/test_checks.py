"""What is refused before training: a changed network, unused learning rates, a wrong direction."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

import attnkit
from attnkit import ViT
from attnkit.finetune import bitfit, full
from attnkit.lightning import (
    BestCheckpoint,
    TaskModule,
    UserError,
    parameter_groups,
    scale_learning_rates,
    warmup_cosine,
)
from attnkit.lightning.modules.checks import MonitorsInSanityCheck
from attnkit.tasks.image_classification import ImageClassification

CNN = {"_target_": "attnkit.models.timm_backbone", "name": "test_resnet", "in_channels": 3,
       "num_classes": 3}  # fmt: skip
VIT = {"_target_": "attnkit.models.timm_backbone", "name": "test_vit", "in_channels": 3,
       "num_classes": 3, "image_size": 32, "img_size": 32}  # fmt: skip
SIZES = {"num_classes": 3, "mean": [0.5] * 3, "std": [0.5] * 3, "image_size": 32}
IMAGES = TensorDataset(torch.rand(4, 3, 32, 32), torch.arange(4) % 3)


class Inserts(ImageClassification):
    def __init__(self, model, se_ratio: int = 4, **kwargs):
        super().__init__(model, **kwargs)
        attnkit.insert_attention(self.model, "se", example=torch.zeros(1, 3, 32, 32))


def insert(module):
    attnkit.insert_attention(module.model, "se", example=torch.zeros(1, 3, 32, 32))


def wrap(module):
    module.model = nn.Sequential(module.model)


CHANGES = {
    "insert": (CNN, insert, "layer1.0.attention"),
    "replace": (VIT, lambda module: attnkit.replace_attention(module.model), "blocks.0.attn"),
    "another head": (VIT, lambda module: module.model.reset_classifier(5), "head.weight"),
    "wrapped": (VIT, wrap, "0.cls_token"),
}


@pytest.fixture
def fit(make_trainer, tmp_path):
    """Train for a step and save; the checkpoint's path."""

    def run(module):
        trainer = make_trainer(max_steps=1)
        trainer.fit(module, DataLoader(IMAGES, 4))
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        return tmp_path / "one.ckpt"

    return run


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_network_is_refused_with_the_names(change, fit):
    node, make, name = CHANGES[change]
    module = ImageClassification(node, **SIZES)
    make(module)
    with pytest.raises(UserError, match="model: the network was changed after it was") as caught:
        fit(module)
    assert name in str(caught.value)
    assert "to ImageClassification as an object" in str(caught.value)
    # what the message says works
    changed = ImageClassification(module.model, **SIZES)
    if change != "another head":
        again = ImageClassification.load_from_checkpoint(fit(changed), model=module.model)
        assert again.model is module.model


def test_a_class_that_makes_the_change_itself_is_trained_and_loaded(fit):
    module = Inserts(CNN, **SIZES)
    again = Inserts.load_from_checkpoint(fit(module))
    assert again.state_dict().keys() == module.state_dict().keys()


# --- learning rates of fine-tuning, which an optimizer of the user's own leaves out ---------------

IGNORED = (
    r"finetune\.layer_decay: not used by Own\.configure_optimizers; give the optimizer "
    r"attnkit\.lightning\.parameter_groups\(self\), then call scale_learning_rates\(optimizer\)$"
)
NOT_SCALED = r"configure_optimizers; call attnkit\.lightning\.scale_learning_rates\(optimizer\)$"


class Own(TaskModule):
    """How the optimizer is made is said from outside."""

    def __init__(self, make, finetune):
        network = ViT(image_size=8, patch_size=4, num_classes=5, dim=6, depth=2, num_heads=1)
        super().__init__(network, finetune=finetune)
        self.make = make

    def configure_optimizers(self):
        return self.make(self)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])


def plain(module, lr=0.1):
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=lr)


def grouped(module):
    return torch.optim.SGD(parameter_groups(module), lr=0.1)


def right(module):
    return scale_learning_rates(grouped(module))


def warmed(make, module):
    optimizer = make(module)
    schedule = warmup_cosine(optimizer, total_steps=10, warmup_fraction=0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def rates_of_ones_own(module):
    others = [p for name, p in module.named_parameters() if "head" not in name]
    return torch.optim.SGD(
        [{"params": others}, {"params": module.model.head.parameters(), "lr": 0.7}], lr=0.1
    )


def by_timm(module):
    from timm.scheduler import CosineLRScheduler

    optimizer = grouped(module)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": CosineLRScheduler(optimizer, 10), "interval": "epoch"},
    }


@pytest.fixture
def fit_rates(make_trainer):
    images = torch.randn(11, 3, 8, 8)
    loader = DataLoader(TensorDataset(images, torch.arange(11) % 5), batch_size=11)

    def run(make, **options):
        module = Own(make, partial(options.pop("method", full), **options))
        module.lr_scheduler_step = lambda *args: None
        make_trainer(max_epochs=1).fit(module, loader)

    return run


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (plain, IGNORED),
        (partial(warmed, plain), IGNORED),
        (grouped, NOT_SCALED),
        (partial(warmed, grouped), NOT_SCALED),
    ],
)
def test_rates_that_would_do_nothing(fit_rates, make, message):
    with pytest.raises(UserError, match=message):
        fit_rates(make, layer_decay=0.5)


def test_the_heads_own_rate(fit_rates):
    with pytest.raises(UserError, match=r"finetune\.head_lr: not used by Own\."):
        fit_rates(plain, head_lr=0.3)
    with pytest.raises(UserError, match="layer_decay and head_lr: not used by Own"):
        fit_rates(plain, head_lr=0.1, layer_decay=0.5)
    fit_rates(partial(plain, lr=0.3), head_lr=0.3)


@pytest.mark.parametrize("make", [right, partial(warmed, right), rates_of_ones_own, by_timm])
def test_rates_that_are_heeded(fit_rates, make):
    fit_rates(make, layer_decay=0.5)
    fit_rates(make, layer_decay=0.5, head_lr=0.3, method=bitfit)


def test_without_rates_any_optimizer_will_do(fit_rates):
    fit_rates(plain)
    fit_rates(plain, layer_decay=1.0)


# --- directions of metrics ------------------------------------------------------------------------


def test_a_metric_of_torchmetrics_says_that_it_is_followed_the_wrong_way(
    small_net, loader, make_trainer
):
    """Whatever its name: a module of the user's, in its sanity check; a task of ours before it."""

    class Hers(small_net):
        def __init__(self):
            super().__init__()
            self.quality, self.gap = MulticlassAccuracy(10), MeanSquaredError()

        def validation_step(self, batch, batch_idx):
            self.quality(self(batch[0]), batch[1])
            self.gap(self(batch[0]).argmax(1).float(), batch[1].float())
            self.log("val/quality", self.quality)
            self.log("val/gap", self.gap)

    for name, wrong, more in (("quality", "min", "more"), ("gap", "max", "less")):
        for callback in (ModelCheckpoint, EarlyStopping, BestCheckpoint):
            follower = callback(monitor=f"val/{name}", mode=wrong)
            trainer = make_trainer(
                callbacks=[MonitorsInSanityCheck(), follower], enable_checkpointing=True
            )
            with pytest.raises(
                UserError, match=f"{callback.__name__}: mode: got {wrong}, but {more}"
            ):
                trainer.fit(Hers(), loader, loader)
            assert trainer.global_step == 0
