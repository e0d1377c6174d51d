"""Pictures composed of digits: what is drawn, and that masks are where it is."""

import dataclasses

import pytest
import torch
from sklearn.datasets import load_digits

from attnkit.tasks.captioning import ScenesData, words_of
from attnkit.tasks.image_classification import (
    DigitGrid,
    KnowsTruth,
    NeedleDigits,
    PlantedShortcut,
)
from attnkit.tasks.image_classification.composed import COLOURS, painted

FEW = {"num_train": 311, "num_val": 7, "num_test": 53}
INK = (torch.from_numpy(load_digits().images) * (255 / 16)).round().to(torch.uint8)
CLASSES = torch.from_numpy(load_digits().target)
ALL = {"needle": NeedleDigits, "grid": DigitGrid, "shortcut": PlantedShortcut}


def made(kind, **options):
    data = ALL[kind](**FEW, **options)
    data.setup()
    return data


def is_digit(picture, number):
    """Whether a picture [8, 8] is one of a class, whatever its tint."""
    known = INK[number == CLASSES].flatten(1).float()
    shape = picture.flatten().float()
    return bool(torch.cosine_similarity(shape[None], known).max() > 0.999)


@pytest.mark.parametrize("kind", ALL)
def test_truth_is_that_of_the_test_split(kind):
    data = made(kind)
    assert isinstance(data, KnowsTruth)
    truth = data.truth()
    loaded = torch.cat([images for images, _ in data.test_dataloader()])
    labels = torch.cat([labels for _, labels in data.test_dataloader()])
    assert torch.equal(truth.images, loaded)
    assert truth.masks.shape == (53, truth.classes.shape[1], *loaded.shape[-2:])
    assert truth.masks.dtype == torch.bool
    for image in range(53):
        assert torch.equal(
            truth.mask_of(image, int(truth.classes[image, 0])), truth.masks[image, 0]
        )
    if kind != "shortcut":
        assert (truth.classes == labels[:, None]).any(dim=1).all()
    absent = next(n for n in range(10) if n not in truth.classes[3].tolist())
    assert truth.mask_of(3, absent) is None


@pytest.mark.parametrize("kind", ALL)
def test_the_seed_decides_and_splits_share_no_handwriting(kind, monkeypatch):
    ink = {}
    compose = ALL[kind].compose

    def kept(self, split, count, digits):
        ink[split] = {tuple(one.flatten().tolist()) for one in digits.ink}
        return compose(self, split, count, digits)

    monkeypatch.setattr(ALL[kind], "compose", kept)
    first, again, other = made(kind), made(kind), made(kind, seed=1)
    for split in FEW:
        name = split.removeprefix("num_")
        assert torch.equal(first.truth(name).images, again.truth(name).images)
        assert not torch.equal(first.truth(name).images, other.truth(name).images)
    twice = len(CLASSES) - len({tuple(one.flatten().tolist()) for one in INK})
    shared = [len(ink[a] & ink[b]) for a, b in (("train", "val"), ("train", "test"))]
    assert max(shared) <= twice


@pytest.mark.parametrize("kind", ALL)
def test_masks_follow_the_pictures_to_another_size(kind):
    large = made(kind, image_size=[48, 64], interpolation="nearest").truth()
    assert large.images.shape[-2:] == large.masks.shape[-2:] == (48, 64)
    coloured = large.images.amax(dim=1) != large.images.amin(dim=1)
    if kind == "grid":
        assert torch.equal(large.masks.sum(dim=1), torch.ones(53, 48, 64))
        coloured = large.images[:, 0].where(large.masks[:, 0], 0) > 0
        large = dataclasses.replace(large, masks=large.masks[:, :1])
        assert large.masks[:, :, :24].any()
        assert not large.masks[:, :, 24:].any()
    assert coloured.any()
    assert not (coloured & ~large.masks.any(dim=1)).any()


def test_only_the_needle_is_coloured_and_of_its_class():
    data = made("needle")
    truth = data.truth()
    assert data.describe()["patch_size"] == 8
    coloured = truth.images.amax(dim=1) != truth.images.amin(dim=1)
    assert not (coloured & ~truth.masks[:, 0]).any()
    assert truth.masks.float().mean(dim=(2, 3)).unique().tolist() == [1 / 16]
    for image, mask, number in zip(truth.images, truth.masks[:, 0], truth.classes, strict=True):
        needle = image[:, mask].amax(dim=0).view(8, 8)
        assert is_digit(needle, number)
    assert len(truth.masks[:, 0].flatten(1).float().argmax(dim=1).unique()) == 16  # everywhere


def test_distractors_are_as_many_as_asked_for():
    for digits, strokes in ((0, 0), (5, 0), (0, 3)):
        truth = made("needle", num_distractors=digits, num_strokes=strokes).truth()
        cells = truth.images.amax(dim=1).unfold(1, 8, 8).unfold(2, 8, 8).flatten(1, 2).flatten(2)
        filled = (cells > 0).any(dim=2).sum(dim=1)
        assert filled.max() == 1 + digits + strokes  # a piece of a digit may be empty
        if not strokes:
            assert filled.min() == 1 + digits


@pytest.mark.parametrize("cells", [2, 3])
def test_each_cell_of_a_grid_holds_its_class(cells):
    data = made("grid", cells=cells)
    truth, labels = data.truth(), data.sets["test"].labels
    each = cells**2
    assert truth.classes.shape == (53, each)
    assert (truth.masks.sum(dim=1) == 1).all()
    for image in range(0, 53, each):
        assert len(truth.classes[image].unique()) == each
        for mask, number in zip(truth.masks[image], truth.classes[image], strict=True):
            assert is_digit(truth.images[image][0, mask].view(8, 8), number)
        if image + each <= 53:  # once with each of its classes
            assert torch.equal(labels[image : image + each], truth.classes[image])
            assert (truth.images[image : image + each] == truth.images[image]).all()


@pytest.mark.parametrize(("strength", "low", "high"), [(1.0, 1, 1), (0.5, 0.4, 0.7), (0.0, 0, 0.2)])
def test_marks_go_with_labels_as_strongly_as_asked(strength, low, high):
    data = made("shortcut", strength=strength)
    agreeing = {}
    for split in ("train", "test"):
        truth, labels = data.truth(split), data.sets[split].labels
        agreeing[split] = float((truth.classes[:, 0] == labels).float().mean())
        for image, mask, number in zip(truth.images, truth.masks[:, 0], truth.classes, strict=True):
            assert mask.sum() == 16
            assert (image[:, mask] == torch.tensor(COLOURS[number])[:, None]).all()
        digits = truth.images[:, 0, 4:12, 4:12]
        assert all(is_digit(one, number) for one, number in zip(digits, labels, strict=True))
    assert low <= agreeing["train"] <= high
    assert agreeing["test"] <= 0.3
    same = made("shortcut", strength=strength, test_mark="training")
    of_test = same.truth().classes[:, 0] == same.sets["test"].labels
    assert low - 0.15 <= of_test.float().mean() <= high + 0.15


def test_marks_are_where_asked_and_are_swapped():
    corner = made("shortcut", place="corner").truth().masks
    assert corner[:, :, :4, :4].all()
    assert corner.sum() == 16 * 53
    truth = made("shortcut").truth()
    assert len(truth.masks.flatten(1).float().argmax(dim=1).unique()) == 12
    other = (truth.classes[:, 0] + 1) % 10
    swapped = painted(truth.images, truth.masks[:, 0], other)
    changed = (swapped != truth.images).any(dim=1)
    assert torch.equal(changed, truth.masks[:, 0])
    back = painted(swapped, truth.masks[:, 0], truth.classes[:, 0])
    assert torch.equal(back, truth.images)


def test_scenes_give_the_same_form():
    data = ScenesData(num_train=101, num_val=3, num_test=11)
    data.setup()
    assert isinstance(data, KnowsTruth)
    truth = data.truth("compositional")
    assert truth.classes is None
    assert truth.masks.shape == (11, 2, 48, 48)
    batch = next(iter(data.test_dataloader()["compositional"]))
    assert torch.equal(truth.images, batch["image"])
    assert torch.equal(truth.masks, batch["masks"])
    sentence = batch["references"][5][0]
    objects = truth.objects_of(5, sentence)
    assert {number for _, number in objects} == {0, 1}
    named = [words_of(sentence)[word] for word, number in objects if number == 1]
    assert batch["scene"][5]["objects"][1]["colour"] in ("cyan", "purple", *named)
    assert truth.objects_of(4, "two dogs") == []
    with pytest.raises(RuntimeError, match="'train' has no masks"):
        data.truth("train")
    with pytest.raises(ValueError, match="objects_of"):
        truth.mask_of(0, 3)


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        ("needle", {"test_fraction": 0.1}, TypeError, "use num_val and num_test"),
        ("needle", {"num_train": 0}, ValueError, "num_train"),
        ("needle", {"num_distractors": -1}, ValueError, "num_distractors"),
        ("needle", {"num_distractors": 12}, ValueError, "at most 15, got 12 [+] 4"),
        ("grid", {"cells": 4}, ValueError, "cells: expected 2 or 3"),
        ("shortcut", {"strength": 1.5}, ValueError, "strength"),
        ("shortcut", {"place": "middle"}, ValueError, "place"),
        ("shortcut", {"test_mark": "none"}, ValueError, "test_mark"),
    ],
)
def test_refuses(kind, options, error, message):
    with pytest.raises(error, match=message):
        ALL[kind](**options)


def test_truth_comes_after_setup():
    with pytest.raises(RuntimeError, match="setup"):
        NeedleDigits().truth()
