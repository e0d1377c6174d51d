"""The module: preprocessing, losses and metrics, held against scikit-learn and plain torch."""

import csv
import functools
import math

import numpy as np
import pytest
import sklearn.metrics
import sklearn.utils.class_weight
import torch
from lightning.pytorch.callbacks import EarlyStopping
from PIL import Image
from task_support import quiet
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from attnkit.lightning import UserError
from attnkit.lightning.callbacks.reports import ClassReport
from attnkit.lightning.modules.classification import class_scores, show_class_scores
from attnkit.tasks.image_classification import (
    DigitsData,
    ImageClassification,
)

NORMALIZED = {"mean": [0.2, 0.4, 0.6], "std": [0.1, 0.2, 0.3]}


def linear(num_classes, side=3, channels=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * side**2, num_classes))


def module(num_classes=7, **options):
    return ImageClassification(
        linear(num_classes), num_classes=num_classes, **{**NORMALIZED, **options}
    )


def samples(count=53, num_classes=7):
    images = torch.randint(0, 256, (count, 3, 3, 3), dtype=torch.uint8)
    return TensorDataset(images, torch.randint(0, num_classes, (count,)))


def test_normalizes_inside():
    task = module()
    images = torch.randint(0, 256, (5, 3, 3, 3), dtype=torch.uint8)
    mean, std = (torch.tensor(NORMALIZED[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    expected = (images / 255 - mean) / std
    torch.testing.assert_close(task.normalized(images), expected)
    torch.testing.assert_close(task(images), task.model(expected))
    torch.testing.assert_close(task(images / 255), task(images))


def test_metrics_agree_with_scikit_learn(tmp_path, capsys):
    data, task = samples(), module(class_names=list("abcdefg"))
    results = quiet(tmp_path, callbacks=[ClassReport(tmp_path / "report")]).test(
        task, DataLoader(data, batch_size=11), verbose=False
    )[0]
    images, labels = data.tensors
    with torch.no_grad():
        logits = task(images)
    predicted = logits.argmax(dim=1)
    assert results["test/loss"] == pytest.approx(
        sklearn.metrics.log_loss(labels, logits.double().softmax(1), labels=range(7)), rel=1e-5
    )
    assert results["test/accuracy"] == pytest.approx(
        sklearn.metrics.accuracy_score(labels, predicted)
    )
    assert results["test/top5_accuracy"] == pytest.approx(
        sklearn.metrics.top_k_accuracy_score(labels, logits, k=5, labels=range(7))
    )
    assert 0 < results["test/accuracy"] < results["test/top5_accuracy"] < 1
    assert results["test/f1"] == pytest.approx(
        sklearn.metrics.f1_score(labels, predicted, average="macro")
    )
    assert results["test/balanced_accuracy"] == pytest.approx(
        sklearn.metrics.balanced_accuracy_score(labels, predicted)
    )
    confusion = sklearn.metrics.confusion_matrix(labels, predicted, labels=range(7))
    assert task.confusion.tolist() == confusion.tolist()
    expected = sklearn.metrics.precision_recall_fscore_support(
        labels, predicted, labels=range(7), zero_division=0
    )
    with (tmp_path / "report" / "per_class.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == list("abcdefg")
    for column, values in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        assert [float(row[column] or 0) for row in rows] == pytest.approx(values.tolist())
    with Image.open(tmp_path / "report" / "confusion_matrix.png") as picture:
        assert min(picture.size) > 300
    assert "test, per class" in capsys.readouterr().out


def test_balanced_accuracy_is_of_the_classes_that_there_are():
    labels = torch.tensor([0, 0, 0, 0, 2])
    logits = functional.one_hot(torch.tensor([0, 0, 0, 1, 2]), 5).float()
    metric = module(5).metrics()["balanced_accuracy"]
    metric.update(logits[:2], labels[:2])
    metric.update(logits[2:], labels[2:])
    assert metric.compute() == pytest.approx((3 / 4 + 1) / 2)


class OwnOptimizer(ImageClassification):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnMetric(ImageClassification):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val/mine", 1.0)


def test_of_ones_own_class_what_it_logs_is_known_where_it_does_not_validate(tmp_path):
    loader = DataLoader(samples(), batch_size=11)

    def fit(cls, monitor, mode="max"):
        task = module()
        task.__class__ = cls
        trainer = quiet(tmp_path, max_epochs=1, callbacks=[EarlyStopping(monitor, mode=mode)])
        trainer.fit(task, loader, loader)
        assert {"val/accuracy", "val/f1"} & {*trainer.progress_bar_metrics} == {"val/accuracy"}
        return trainer.current_epoch

    with pytest.raises(UserError, match=r"nothing logs its monitor 'val/mine'; validation logs"):
        fit(OwnOptimizer, "val/mine")
    with pytest.raises(UserError, match="EarlyStopping: mode: got min, but more of 'val/f1'"):
        fit(OwnMetric, "val/f1", mode="min")
    assert fit(OwnOptimizer, "val/f1") == 1
    assert fit(OwnMetric, "val/mine") == 1


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_class_weights_are_torchs(tmp_path, smoothing):
    data, weights = samples(20), [0.5, 1.0, 2.0, 0.0, 1.0, 3.0, 0.25]
    task = module(class_weights=weights, label_smoothing=smoothing)
    images, labels = data.tensors
    losses = task.losses(task(images), labels)
    expected = functional.cross_entropy(
        task(images), labels, torch.tensor(weights), label_smoothing=smoothing, reduction="sum"
    )
    torch.testing.assert_close(losses.sum(), expected)
    loader = DataLoader(data, batch_size=20)
    plain = quiet(tmp_path).validate(task, loader, verbose=False)[0]["val/loss"]
    assert plain == pytest.approx(functional.cross_entropy(task(images), labels).item(), rel=1e-5)


def test_balanced_weights_come_from_the_training_images(tmp_path):
    data = DigitsData(augment=None)
    data.setup()
    task = ImageClassification(
        linear(10, 8, 1),
        num_classes=10,
        in_channels=1,
        mean=[0.5],
        std=[0.5],
        class_weights="balanced",
    )
    quiet(tmp_path, max_steps=1).fit(task, datamodule=data)
    labels = data.sets["train"].labels.numpy()
    expected = sklearn.utils.class_weight.compute_class_weight(
        "balanced", classes=np.arange(10), y=labels
    )
    assert task.class_weights.numpy() == pytest.approx(expected)
    loader = DataLoader(samples(), batch_size=11)
    with pytest.raises(UserError, match=r"module\.class_weights: the data do not say"):
        quiet(tmp_path, max_steps=1).fit(module(class_weights="balanced"), loader)


def test_a_second_test_starts_anew(tmp_path):
    data, task = samples(), module()
    for _ in range(2):
        quiet(tmp_path).test(task, DataLoader(data, batch_size=11), verbose=False)
        assert task.confusion.sum() == 53
        assert sum(score.support for score in task.class_scores) == 53


def test_means_are_over_samples_not_batches(tmp_path):
    data, task = samples(23), module()
    trainer = quiet(tmp_path, max_epochs=1)
    frozen = functools.partial(torch.optim.SGD, lr=0.0)
    task = ImageClassification(task.model, frozen, num_classes=7, **NORMALIZED)
    loader = DataLoader(data, batch_size=11)  # 11, 11, 1
    trainer.fit(task, loader, loader)
    images, labels = data.tensors
    loss = functional.cross_entropy(task(images), labels).item()
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx(loss, rel=1e-6)
    assert trainer.callback_metrics["val/loss"].item() == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(("num_classes", "has_top5"), [(5, False), (6, True)])
def test_top5_needs_more_than_five_classes(tmp_path, num_classes, has_top5):
    results = quiet(tmp_path).test(
        module(num_classes), DataLoader(samples(9, num_classes), 4), verbose=False
    )[0]
    assert ("test/top5_accuracy" in results) == has_top5


def seen_by_model(task, images, labels):
    """What the model was given, and the targets that its logits were held against."""
    seen = {}
    task.model.register_forward_hook(lambda _, args, out: seen.update(images=args[0], logits=out))
    task.log = lambda *_, **__: None
    seen["loss"] = task.training_step((images, labels), 0)
    return seen


def test_mixup_mixes_images_and_targets_alike():
    images, labels = samples(20).tensors
    task = module(mixup=1.0)
    plain = task.normalized(images)
    torch.manual_seed(1)
    seen = seen_by_model(task, images, labels)
    partner = plain.roll(1, 0)
    differs = (plain - partner).abs() > 0.1
    share = ((seen["images"] - partner) / (plain - partner))[differs]
    assert share.std() < 1e-3
    share = share.mean().item()
    assert 0.01 < share < 0.99
    hot = functional.one_hot(labels, 7).float()
    targets = share * hot + (1 - share) * hot.roll(1, 0)
    expected = -(targets * seen["logits"].log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(seen["loss"], expected, rtol=1e-4, atol=1e-5)


def test_cutmix_pastes_a_rectangle():
    images = torch.randint(0, 256, (20, 3, 16, 16), dtype=torch.uint8)
    labels = torch.arange(20) % 7
    task = ImageClassification(linear(7, 16), num_classes=7, cutmix=1.0, **NORMALIZED)
    plain = task.normalized(images)
    torch.manual_seed(2)
    seen = seen_by_model(task, images, labels)["images"]
    pasted, kept = seen == plain.roll(1, 0), seen == plain
    assert (pasted | kept).all()
    assert 0 < (~kept).float().mean() < 1


def test_mixing_is_for_training_only(tmp_path):
    data = samples()
    results = [
        quiet(tmp_path).test(task, DataLoader(data, 53), verbose=False)[0]["test/loss"]
        for model in [linear(7)]
        for task in (
            ImageClassification(model, num_classes=7, **NORMALIZED),
            ImageClassification(model, num_classes=7, mixup=1.0, cutmix=1.0, **NORMALIZED),
        )
    ]
    assert results[0] == results[1]


def test_other_classes_than_the_modules_are_refused(tmp_path):
    task = ImageClassification(
        linear(10, 8, 1),
        num_classes=10,
        in_channels=1,
        mean=[0.5],
        std=[0.5],
        class_names=list("0123456798"),
    )
    with pytest.raises(UserError, match="expected 9, got 8"):
        quiet(tmp_path).test(task, datamodule=DigitsData(), verbose=False)


def test_predictions_are_named_and_ranked():
    task = module(3, class_names=["x", "y", "z"])
    images = torch.randint(0, 256, (4, 3, 3, 3), dtype=torch.uint8)
    rows = task.predict_step((images, ["a", "b", "c", "d"]), 0)
    assert rows["path"] == ["a", "b", "c", "d"]
    probabilities = task(images).softmax(1)
    for number in range(4):
        ranked = probabilities[number].sort(descending=True)
        assert [name for name, _ in rows["top5"][number]] == ["xyz"[i] for i in ranked.indices]
        assert rows["label"][number] == "xyz"[ranked.indices[0]]
        assert rows["probability"][number] == pytest.approx(ranked.values[0].item())
    assert "path" not in task.predict_step((images, torch.zeros(4)), 0)
    assert task.predict_step((images, torch.tensor([2, 0, 1, 0])), 0)["truth"] == list("zxyx")
    assert rows["p(y)"] == pytest.approx(probabilities[:, 1].tolist())
    assert task.predict_step((images[:0], []), 0)["label"] == []


def test_many_classes_show_the_worst(capsys):
    stats = torch.tensor([[number, 100 - number, 0, 100 - number, 100] for number in range(60)])
    show_class_scores(class_scores(stats, [f"class {number}" for number in range(60)]))
    shown = capsys.readouterr().out
    assert "40 of 60 with the lowest F1" in shown
    assert "class 39" in shown
    assert "class 40" not in shown

    stats = torch.cat([torch.tensor([[0, 9, 90, 0, 0]] * 30), stats[:45]])  # 30 have no samples
    show_class_scores(class_scores(stats, [f"class {number - 30}" for number in range(75)]))
    shown = capsys.readouterr().out
    assert "class 39" in shown
    assert "class -1" not in shown


def test_a_class_without_images_has_no_recall():
    scores = class_scores(torch.tensor([[3, 1, 4, 0, 3], [0, 0, 8, 0, 0]]), ["a", "b"])
    assert scores[0][1:] == (0.75, 1.0, pytest.approx(6 / 7), 3)
    assert scores[1][1:] == (None, None, None, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 1}, "num_classes"),
        ({"class_names": ["a"]}, "class_names: expected 7"),
        ({"mean": [0.5]}, "mean: expected 3"),
        ({"std": [1.0, 0.0, 1.0]}, "std"),
        ({"std": [1.0, float("nan"), 1.0]}, "std: expected positive numbers"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"mixup": -1}, "mixup"),
        ({"cutmix": -1}, "cutmix"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ImageClassification(linear(7), **{"num_classes": 7, **NORMALIZED, **options})


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"mixup": 1.0}, {}])
def test_the_plain_loss_is_logged_where_another_is_minimised(options):
    """Before a step, the network says the same of every class: its plain loss is log 3."""
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    torch.nn.init.zeros_(network[1].weight)
    torch.nn.init.constant_(network[1].bias, 0.0)
    network[1].bias.data[0] = 2.0
    module = ImageClassification(
        network, num_classes=3, mean=[0.5], std=[0.5], in_channels=1, **options
    )
    logged = {}
    module.log = lambda name, metric, **_: logged.__setitem__(name, metric)
    images = torch.randint(0, 256, (8, 1, 2, 2), dtype=torch.uint8)
    module.training_step((images, torch.zeros(8, dtype=torch.long)), 0)
    plain = math.log(math.e**2 + 2) - 2
    if options:
        assert logged["train/plain_loss"].compute().item() == pytest.approx(plain, rel=1e-4)
    else:
        assert "train/plain_loss" not in logged
    if "label_smoothing" in options:
        assert logged["train/loss"].compute().item() > plain + 0.05
