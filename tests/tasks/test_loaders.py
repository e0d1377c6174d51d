"""One loader for the data of all tasks: the parts of the processes, and data too small for them."""

import numpy as np
import pytest
import torch
from lightning import Trainer
from PIL import Image
from torch.utils.data import SequentialSampler

from attnkit.lightning import UserError
from attnkit.lightning.resume.sampler import (
    EpochSampler,
    PlacedSampler,
    ResumableSampler,
    UnpaddedSampler,
    in_one_order,
)
from attnkit.tasks.captioning import ScenesData
from attnkit.tasks.graphs import DictionaryLookupData, DigitsGraphData
from attnkit.tasks.image_classification import DigitsData, PredictData


def in_processes(data, count):
    """The data module as rank 0 of so many processes has it; none is started."""
    data.trainer = Trainer(
        accelerator="cpu", devices=count, strategy="ddp", logger=False, barebones=True
    )
    assert (data.trainer.world_size, data.trainer.global_rank) == (count, 0)
    return data


SMALL = {
    "179 val images": lambda: DigitsData(),
    "3 val images": lambda: ScenesData(num_train=9, num_val=3, num_test=5),
    "2 val graphs": lambda: DictionaryLookupData(4, num_graphs=20),
    "20 val nodes": lambda: DigitsGraphData(num_val=20, batch_size=4),
}


@pytest.mark.parametrize("what", SMALL)
def test_fewer_than_processes(what):
    count = int(what.split()[0])
    data = SMALL[what]()
    data.setup()
    loader = in_processes(data, count).val_dataloader()
    assert len(loader.sampler) == 1
    with pytest.raises(UserError, match=f"data: {what} are too few for {count + 1} processes"):
        in_processes(data, count + 1).val_dataloader()


def test_a_prediction_may_be_of_fewer_images_than_processes(tmp_path):
    Image.fromarray(np.zeros((5, 5), dtype=np.uint8)).save(tmp_path / "one.png")
    data = in_processes(PredictData(tmp_path, image_size=5), 3)
    data.setup()
    assert len(data.predict_dataloader().sampler) == 1


def test_training_is_shuffled_by_the_seed_and_padded():
    data = DictionaryLookupData(5, num_graphs=103, batch_size=7, seed=3)
    data.setup()
    orders = []
    for epoch in (0, 1):
        sampler = in_processes(data, 2).train_dataloader().sampler
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    count = len(data.sets["train"])
    assert count % 2 == 1
    assert len(orders[0]) == len(orders[1]) == (count + 1) // 2
    assert orders[0] != orders[1]
    generator = torch.Generator().manual_seed(3)  # as torch's DistributedSampler draws it
    assert orders[0] == torch.randperm(count, generator=generator).tolist()[::2]


@pytest.mark.parametrize("kind", [ResumableSampler, EpochSampler, PlacedSampler, UnpaddedSampler])
def test_overfitting_has_one_order(kind):
    """That of the first epoch of the sampler itself, and Lightning leaves it where it is."""
    items = list(range(23))
    sampler, plain = in_one_order(kind)(items, 2, 1), kind(items, 2, 1)
    assert isinstance(sampler, SequentialSampler)
    first = list(plain)
    for epoch in (0, 3):
        sampler.set_epoch(epoch)
        assert list(sampler) == first
    plain.set_epoch(3)
    assert (list(plain) != first) == (kind is not UnpaddedSampler)
