"""Anybody's data module in task=vit: what a model has to know is found, or asked for."""

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from attnkit.lightning import DescribedData, UserError
from attnkit.tasks.image_classification import DigitsData, describe_batches

LABELS = torch.arange(30) % 5


class Theirs(LightningDataModule):
    """As most are written."""

    def __init__(self, dataset, **facts):
        super().__init__()
        self.dataset = dataset
        self.__dict__.update(facts)

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=8, shuffle=True)


class Plain(Dataset):
    """Says nothing of its labels."""

    def __init__(self, *tensors):
        self.all = tensors

    def __len__(self):
        return len(self.all[0])

    def __getitem__(self, number):
        return tuple(tensor[number] for tensor in self.all)


def test_shapes_classes_mean_and_deviation():
    images = torch.rand(30, 3, 16, 24)
    found = describe_batches(Theirs(Subset(TensorDataset(images, LABELS), range(25))))
    assert found["image_size"] == [16, 24]
    assert (found["in_channels"], found["num_classes"]) == (3, 5)
    assert found["class_names"] == ["0", "1", "2", "3", "4"]
    seen = images[:25].double().numpy()
    np.testing.assert_allclose(found["mean"], seen.mean(axis=(0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(found["std"], seen.std(axis=(0, 2, 3)), rtol=1e-6)


def test_bytes_are_on_the_scale_of_one_and_normalised_pixels_stay():
    grey = torch.randint(0, 256, (30, 1, 8, 8), dtype=torch.uint8)
    found = describe_batches(Theirs(TensorDataset(grey, LABELS)))
    assert (found["image_size"], found["in_channels"]) == (8, 1)
    np.testing.assert_allclose(found["mean"], [grey.double().mean() / 255])
    found = describe_batches(Theirs(TensorDataset(torch.randn(30, 3, 8, 8), LABELS)))
    assert (found["mean"], found["std"]) == ([0.0] * 3, [1.0] * 3)


@pytest.mark.parametrize(
    ("facts", "names"),
    [
        ({"class_names": ["a", "b", "c", "d", "e"]}, ["a", "b", "c", "d", "e"]),
        ({"num_classes": 6}, ["0", "1", "2", "3", "4", "5"]),
        ({"classes": ("a", "b", "c", "d", "e")}, ["a", "b", "c", "d", "e"]),
    ],
)
def test_classes_that_the_module_tells(facts, names):
    data = Theirs(Plain(torch.rand(30, 1, 8, 8), LABELS), **facts)
    assert describe_batches(data)["class_names"] == names


@pytest.mark.parametrize(
    ("dataset", "facts", "message"),
    [
        (Plain(torch.rand(30, 1, 8, 8), LABELS), {}, "Theirs does not tell how many classes"),
        (Plain(torch.rand(30, 1, 8, 8), LABELS), {"num_classes": 3}, "labels outside 0 to 2"),
        (Plain(torch.rand(30, 2, 8, 8), LABELS), {}, "images of 1 or 3 channels, got 2"),
        (Plain(torch.rand(30, 8), LABELS), {}, r"got float32 \[8, 8\], int64 \[8\]"),
        (Plain(torch.rand(30, 1, 8, 8), LABELS.float()), {}, "integer"),
        (TensorDataset(torch.rand(30, 1, 8, 8)), {}, "expected batches of images"),
    ],
)
def test_what_lacks_is_said(dataset, facts, message):
    with pytest.raises(UserError, match=message) as error:
        describe_batches(Theirs(dataset, **facts))
    assert len(str(error.value).splitlines()) <= 3


def test_ours_are_described():
    assert isinstance(DigitsData(), DescribedData)
    assert not isinstance(Theirs(None), DescribedData)
