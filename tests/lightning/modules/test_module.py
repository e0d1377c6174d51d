from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from lightning import Trainer
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from attnkit.lightning import TaskModule, UserError

CONFIG = {
    "_target_": "torch.nn.Sequential",
    "_args_": [
        {"_target_": "torch.nn.Linear", "in_features": 7, "out_features": 5},
        {"_target_": "torch.nn.LayerNorm", "normalized_shape": 5},
    ],
}


class Task(TaskModule):
    """As users write them: arguments of its own, handed up with the rest."""

    def __init__(self, model, optimizer=None, scheduler=None, *, names=("a", "b"), root=None):
        super().__init__(model, optimizer, scheduler)
        self.names = names
        self.root = root

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss


class WithKwargs(Task):
    def __init__(self, model, extra: int, **kwargs):
        super().__init__(model, **kwargs)
        self.extra = extra


@pytest.fixture
def data():
    return DataLoader(TensorDataset(torch.randn(33, 7), torch.randint(0, 5, (33,))), batch_size=3)


@pytest.fixture
def fit(make_trainer, data, tmp_path):
    """Train a module for two epochs, 22 steps; gives the checkpoint's path and the trainer."""

    def run(module, **kwargs):
        trainer = make_trainer(**kwargs)
        trainer.fit(module, data)
        path = tmp_path / "task.ckpt"
        trainer.save_checkpoint(path)
        return path, trainer

    return run


def test_a_configured_module_comes_back_from_its_checkpoint_alone(fit):
    optimizer = {"_target_": "torch.optim.SGD", "lr": 0.1}
    module = WithKwargs(CONFIG, 3, optimizer=optimizer, names=("x", "y"), root=Path("/somewhere"))
    path, _ = fit(module)
    assert torch.load(path, weights_only=True)["hyper_parameters"] == {
        "model": CONFIG,
        "optimizer": optimizer,
        "scheduler": None,
        "extra": 3,
        "names": ["x", "y"],
        "root": "/somewhere",
    }
    again = WithKwargs.load_from_checkpoint(path)
    assert (again.extra, list(again.names), again.root) == (3, ["x", "y"], "/somewhere")
    for name, value in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_objects_are_not_saved_and_asked_for_again(fit):
    net = nn.Linear(7, 5)
    path, _ = fit(Task(net, partial(torch.optim.SGD, lr=0.1), lambda o: StepLR(o, 7)))
    hyper_parameters = torch.load(path, weights_only=True)["hyper_parameters"]
    assert hyper_parameters == {"names": ["a", "b"], "root": None}
    with pytest.raises(UserError, match=r"does not hold model.*\n.*path, model=…"):
        Task.load_from_checkpoint(path)
    again = Task.load_from_checkpoint(path, model=nn.Linear(7, 5))
    assert torch.equal(again.model.weight, net.weight)


def test_pretrained_weights_are_not_fetched_again(tmp_path, monkeypatch):
    """A checkpoint has the weights, and where it is loaded there may be no network."""
    asked, create = [], timm.create_model

    def offline(name, pretrained, **kwargs):
        asked.append(pretrained)
        return create(name, **kwargs)

    monkeypatch.setattr(timm, "create_model", offline)
    backbone = {
        "_target_": "attnkit.models.timm_backbone", "name": "test_resnet",
        "in_channels": 1, "num_classes": 5, "pretrained": True,
    }  # fmt: skip
    module = Task({"_target_": "torch.nn.Sequential", "_args_": [backbone]})
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "task.ckpt", weights_only=True)
    again = Task.load_from_checkpoint(tmp_path / "task.ckpt")
    assert asked == [True, False]
    for name, value in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_poisoned_checkpoint_is_refused(fit):
    path, _ = fit(Task(CONFIG))
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["hyper_parameters"]["model"] = {"_target_": "os.getcwd"}
    torch.save(checkpoint, path)
    with pytest.raises(UserError, match=r"os\.getcwd is outside the allowed packages"):
        Task.load_from_checkpoint(path)


def test_training_goes_on_from_a_checkpoint(make_trainer, data, fit):
    path, _ = fit(Task(CONFIG))
    trainer = make_trainer(max_epochs=3)
    trainer.fit(Task(CONFIG), data, ckpt_path=path, weights_only=True)
    assert trainer.global_step == 33


def test_defaults(fit):
    _, trainer = fit(Task(CONFIG))
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.05, 0.0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]
    # stepped once per step: after 22 of 22 it is at its floor
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-5, 1e-5])


def test_accumulation_counts_optimizer_steps(fit):
    _, trainer = fit(Task(CONFIG), accumulate_grad_batches=4)
    assert trainer.global_step == 6
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-5)


@pytest.mark.parametrize(
    "scheduler",
    [
        {"_target_": "attnkit.lightning.warmup_cosine", "min_lr_fraction": 0.5},
        {"_target_": "attnkit.lightning.warmup_cosine", "min_lr_fraction": 0.5, "_partial_": True},
        {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 22, "gamma": 0.5},
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 - 0.5 * step / 22),
        lambda optimizer, total_steps: LambdaLR(optimizer, lambda step: 1 - step / 2 / total_steps),
    ],
    ids=["config", "partial config", "torch's", "callable", "total_steps"],
)
@pytest.mark.parametrize(
    "optimizer",
    [
        {"_target_": "torch.optim.SGD", "lr": 0.25, "weight_decay": 0.1},
        partial(torch.optim.SGD, lr=0.25, weight_decay=0.1),
    ],
    ids=["config", "callable"],
)
def test_optimizer_and_scheduler(fit, optimizer, scheduler):
    _, trainer = fit(Task(CONFIG, optimizer, scheduler))
    groups = trainer.optimizers[0].param_groups
    assert isinstance(trainer.optimizers[0], torch.optim.SGD)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [group["lr"] for group in groups] == pytest.approx([0.125, 0.125])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"model": 3},
            TypeError,
            "model: expected an nn.Module or a mapping with _target_, got int",
        ),
        ({"model": {"dim": 3}}, TypeError, "model: .* got dict"),
        ({"model": CONFIG, "optimizer": "adam"}, TypeError, "optimizer: expected a callable"),
        ({"model": CONFIG, "optimizer": {"lr": 1}}, UserError, "optimizer: expected a _target_"),
        (
            {"model": CONFIG, "scheduler": {"_target_": "torch.optim.lr_scheduler.StepL"}},
            UserError,
            "scheduler._target_: .*did you mean StepLR",
        ),
    ],
)
def test_refuses_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        Task(**arguments)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"optimizer": {"_target_": "torch.optim.SGD", "learn": 1}}, {}, "optimizer: SGD.*'learn'"),
        ({"optimizer": {"_target_": "torch.optim.SGD", "lr": -1}}, {}, "SGD: .*learning rate"),
        ({"scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR"}}, {}, "step_size"),
        ({"scheduler": ReduceLROnPlateau}, {}, r"which metric.*lightning\.Plateau has an arg"),
        ({}, {"max_epochs": -1}, r"set trainer\.max_epochs or max_steps"),
        ({"model": nn.Linear(7, 5).requires_grad_(False)}, {}, "no parameter that requires a gra"),
    ],
)
def test_refuses_when_training_starts(make_trainer, data, arguments, options, message):
    with pytest.raises(UserError, match=message):
        make_trainer(**options).fit(Task(**{"model": CONFIG, **arguments}), data)
