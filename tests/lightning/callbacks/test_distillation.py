"""A student of a frozen teacher: its loss, what it learns, what is kept, and what is refused."""

import math
from functools import partial

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import attnkit
from attnkit.lightning import Distillation
from attnkit.lightning.callbacks import distillation
from attnkit.tasks.image_classification import DigitsData, ImageClassification

MEAN, STD = [0.3], [0.4]
FREE = {"augment": None, "batch_size": 64}


def classifier(seed=0, network=None, **options):
    torch.manual_seed(seed)
    network = network or attnkit.ViT(
        image_size=8, patch_size=4, in_channels=1, num_classes=10, dim=24, depth=1, num_heads=2
    )
    options = {"num_classes": 10, "in_channels": 1, "mean": MEAN, "std": STD, **options}
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    return ImageClassification(network, optimizer, image_size=8, **options)


class WithHead(nn.Module):
    def __init__(self, dim=5, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, dim), nn.Dropout(dropout))
        self.head = nn.Linear(dim, 10)

    def forward(self, images):
        return self.head(self.body(images))


class Asked(WithHead):
    """A teacher that knows how many images it was asked about."""

    def __init__(self):
        super().__init__(dim=13, dropout=0.9)
        self.seen = 0

    def forward(self, images):
        self.seen += len(images)
        assert not self.training
        assert not torch.is_grad_enabled()
        return super().forward(images)


class Watched(ImageClassification):
    """Remembers what its first step saw and said."""

    def losses(self, logits, labels):
        self.said = {"logits": logits.detach(), "own": super().losses(logits, labels).detach()}
        return super().losses(logits, labels)

    def training_step(self, batch, batch_idx):
        hook = self.model.register_forward_pre_hook(lambda _, given: setattr(self, "saw", given[0]))
        loss = super().training_step(batch, batch_idx)
        hook.remove()
        self.said["loss"] = loss.detach()
        return loss


@pytest.fixture
def fit(make_trainer, caplog):
    def run(teacher, epochs=2, data=None, student=None, batches=1.0, **options):
        student = student or classifier(1)
        trainer = make_trainer(
            max_epochs=epochs, num_sanity_val_steps=0, callbacks=[Distillation(teacher, **options)],
            limit_train_batches=batches,
        )  # fmt: skip
        caplog.clear()
        with caplog.at_level("INFO"):
            trainer.fit(student, data or DigitsData(**FREE))
        said = [r.getMessage() for r in caplog.records if r.name == distillation.__name__]
        return student, trainer, said

    return run


@pytest.mark.parametrize(("weight", "features"), [(0.3, 0.0), (0.0, 0.7), (0.3, 0.7)])
def test_the_loss_is_the_formula(fit, weight, features):
    torch.manual_seed(0)
    teacher, network = Asked(), WithHead()
    options = {"num_classes": 10, "in_channels": 1, "mean": MEAN, "std": STD}
    student = Watched(network, mixup=0.5, label_smoothing=0.1, **options)
    student.optimizer = torch.optim.SGD(student.parameters(), lr=0.0)
    student.configure_optimizers = lambda: student.optimizer
    fit(teacher, 1, student=student, batches=1, temperature=3.0, weight=weight, features=features)
    pictures = student.saw * STD[0] + MEAN[0]
    with torch.no_grad():
        seen = teacher.body(pictures)
        theirs = (teacher.head(seen) / 3).softmax(1).double()
        ours = (student.said["logits"] / 3).softmax(1).double()
        entering = network.body(student.saw)
    grams = []
    for rows in (entering.double(), seen.double()):
        gram = torch.stack([torch.stack([(a * b).sum() for b in rows]) for a in rows])
        grams.append(gram / gram.square().sum(1, keepdim=True).sqrt())
    expected = []
    for i, own in enumerate(student.said["own"]):
        kl = sum(float(t * math.log(t / s)) for t, s in zip(theirs[i], ours[i], strict=True))
        apart = sum(float((a - b) ** 2) for a, b in zip(grams[0][i], grams[1][i], strict=True))
        expected.append((1 - weight) * float(own) + weight * 9 * kl + features * apart)
    assert float(student.said["loss"]) == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_a_student_gets_nearer_to_its_teacher(fit, make_trainer):
    teacher = classifier(3)
    make_trainer(max_epochs=6).fit(teacher, DigitsData(**FREE))
    teacher.eval()
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    data = DigitsData(**FREE)
    data.setup("fit")
    images = torch.cat([batch[0] for batch in data.val_dataloader()])
    wanted = teacher(images).log_softmax(1)

    def distance(student):
        student.eval()
        with torch.no_grad():
            return float(F.kl_div(student(images).log_softmax(1), wanted, reduction="batchmean",
                                  log_target=True))  # fmt: skip

    class AsNetwork(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher = teacher

        def forward(self, pictures):
            return teacher(pictures)

    def small():
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
        return classifier(4, network)

    alone = small()
    make_trainer(max_epochs=4).fit(alone, DigitsData(**FREE))
    taught, trainer, _ = fit(AsNetwork(), 4, student=small(), weight=1.0, temperature=2.0)
    assert distance(taught) < 0.7 * distance(alone)
    assert trainer.callback_metrics["train/distill_loss"] > 0
    assert all(torch.equal(before[name], t) for name, t in teacher.state_dict().items())
    assert "losses" not in vars(taught)
    assert not taught.model._forward_pre_hooks


def test_a_teacher_is_asked_once_for_each_image_where_none_changes(fit):
    torch.manual_seed(0)
    results = []
    for cache in (True, False):
        torch.manual_seed(5)
        teacher = Asked()
        student, _, said = fit(teacher, 3, features=0.5, cache=cache)
        results.append((teacher.seen, student.state_dict(), said))
    (once, kept, said), (often, asked, other) = results
    assert said == ["distill: the teacher runs once for each image"]
    assert other == ["distill: the teacher runs in every step: distill.cache=false"]
    assert once < 1.3 * often / 3
    for name, tensor in asked.items():
        torch.testing.assert_close(kept[name], tensor, rtol=1e-3, atol=1e-4)


class Noisy(DigitsData):
    """Draws, and does not say so."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        images, labels = super().on_after_batch_transfer(batch, dataloader_idx)
        return images + torch.randint_like(images, 9), labels


def test_images_that_change_are_shown_to_the_teacher_each_time(fit):
    for data, student, reason in (
        (DigitsData(augment=nn.Identity()), None, "the data are augmented"),
        (None, classifier(1, cutmix=0.5), "module.mixup or cutmix mixes the samples"),
        (Noisy(**FREE), None, "no image occurred twice"),
    ):
        teacher = Asked()
        *_, said = fit(teacher, 3, data=data, student=student)
        assert said[-1].startswith(f"distill: the teacher runs in every step: {reason}")
        assert teacher.seen > 3 * 1200


def run(*words, **values):
    trainer = {"max_epochs": 2, "accelerator": "cpu", "limit_batches": 8}
    values["trainer"] = {**trainer, **values.get("trainer", {})}
    small = ("model.dim=24", "model.depth=2", "callbacks.curves=null", "logger.tensorboard=null")
    return attnkit.run("task=vit", *small, *words, **values)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder of a teacher of grey digits, 16 pixels wide."""
    folder = tmp_path_factory.mktemp("taught") / "teacher"
    run("data.image_size=16", "model.patch_size=4", run_dir=str(folder))
    return folder


@pytest.fixture
def teacher(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return trained


def test_a_run_resumed_is_the_same_and_no_checkpoint_holds_the_teacher(teacher):
    words = (
        "data.augment=null",
        "scheduler=constant",
        f"distill.teacher={teacher}",
        "distill.features=0.5",
    )
    whole = run(*words, run_dir="whole")
    run(*words, run_dir="parts", trainer={"max_steps": 11})
    parts = attnkit.run("resume=parts", "trainer.max_steps=-1")
    plain = run(run_dir="plain", trainer={"max_epochs": 1})
    states = [
        torch.load(each.folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for each in (whole, parts, plain)
    ]
    assert states[0].keys() == states[1].keys() == states[2].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert whole.config["distill"]["teacher"].endswith("teacher/checkpoints/best.ckpt")
    assert attnkit.run("run=test", ckpt="whole").results["test/accuracy"] > 0.1


def test_what_is_refused(teacher, capsys):
    from attnkit.launch.main import main

    kinds = "expected a run folder, a checkpoint or a name of timm's registry, got 'nowhere'"
    for words, message in (
        (["distill.teacher=nowhere"], f"distill.teacher: {kinds}"),
        (["distill.teacher=runs/nowhere"], "distill.teacher: no file "),
        (["distill.teacher=nowhere.ckpt"], "distill.teacher: no file "),
        (["distill.teacher=resnet18"], "distill.teacher: expected the 10 classes of the data, got "
         "the 1000 of resnet18"),
        (["distill.teacher=resnet18", "distill.weight=0", "distill.features=1"], "distill.teacher: "
         "pretrained: the weights of resnet18 cannot be loaded"),
        ([f"distill.teacher={teacher}", "distill.weight=2"], "weight: expected 0 <= weight <= 1"),
        (["distill.teacher=."], "distill.teacher: no checkpoints/best.ckpt in"),
        ([f"distill.teacher={teacher}", "task=graph"], "distill.teacher: NodeClassification is no "
         "classifier of images"),
        (["distill.weight=0.9"], "distill.weight=0.9: has no effect without distill.teacher"),
        (["distill={weight:0.9}"], "distill={weight:0.9}: has no effect without distill.teacher"),
    ):  # fmt: skip
        assert main(["task=vit", "run_dir=student", "trainer=cpu", *words]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert "Traceback" not in said
        assert said.strip().count("\n") <= 2


def test_a_name_of_timm_with_its_size_and_colours(fit, monkeypatch):
    torch.manual_seed(0)
    theirs = timm.create_model("test_vit", num_classes=1000)
    nn.init.normal_(theirs.head.weight)
    make, seen = timm.create_model, []

    def without_a_hub(name, pretrained=False, **options):
        overlay = {"state_dict": theirs.state_dict(), "num_classes": 1000}
        network = make(name, pretrained=pretrained, pretrained_cfg_overlay=overlay, **options)
        network.register_forward_hook(lambda _, given, out: seen.append((given[0], out)))
        return network

    monkeypatch.setattr(timm, "create_model", without_a_hub)
    student = classifier(1, nn.Sequential(nn.Flatten(), nn.Linear(64, 1000)), num_classes=1000)
    fit("test_vit", 1, student=student, batches=1)
    ((images, logits),) = seen[-1:]
    config = theirs.pretrained_cfg
    assert images.shape[1:] == config["input_size"]
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    pictures = images * std + mean
    torch.testing.assert_close(pictures[:, 0], pictures[:, 2])  # of grey images
    assert 0.1 < float(pictures.mean()) < 0.6
    torch.testing.assert_close(logits, theirs.eval()(images))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": 1.5}, "weight: expected 0 <= weight <= 1, got 1.5"),
        ({"temperature": 0}, "temperature: expected a positive number, got 0"),
        ({"features": -1}, "features: expected at least 0, got -1"),
        ({"weight": 0}, "weight: expected weight or features above 0, got 0 for both"),
    ],
)
def test_numbers_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Distillation(Asked(), **options)
