"""An optimizer of the user's own that leaves the rates of fine-tuning out is refused."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from attnkit import ViT
from attnkit.finetune import bitfit, full
from attnkit.lightning import (
    TaskModule,
    UserError,
    parameter_groups,
    scale_learning_rates,
    warmup_cosine,
)

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
def fit(make_trainer):
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
def test_rates_that_would_do_nothing(fit, make, message):
    with pytest.raises(UserError, match=message):
        fit(make, layer_decay=0.5)


def test_the_heads_own_rate(fit):
    with pytest.raises(UserError, match=r"finetune\.head_lr: not used by Own\."):
        fit(plain, head_lr=0.3)
    with pytest.raises(UserError, match="layer_decay and head_lr: not used by Own"):
        fit(plain, head_lr=0.1, layer_decay=0.5)
    fit(partial(plain, lr=0.3), head_lr=0.3)


@pytest.mark.parametrize("make", [right, partial(warmed, right), rates_of_ones_own, by_timm])
def test_rates_that_are_heeded(fit, make):
    fit(make, layer_decay=0.5)
    fit(make, layer_decay=0.5, head_lr=0.3, method=bitfit)


def test_without_rates_any_optimizer_will_do(fit):
    fit(plain)
    fit(plain, layer_decay=1.0)
