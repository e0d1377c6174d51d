"""A network that its configuration does not build is refused at the start of fit."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import attnkit
from attnkit.lightning import UserError
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


def fit(module, folder):
    trainer = L.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, DataLoader(IMAGES, 4))
    trainer.save_checkpoint(folder / "one.ckpt")


@pytest.mark.parametrize("change", CHANGES)
def test_refused_with_the_names(change, tmp_path):
    node, make, name = CHANGES[change]
    module = ImageClassification(node, **SIZES)
    make(module)
    with pytest.raises(UserError, match="model: the network was changed after it was") as caught:
        fit(module, tmp_path)
    assert name in str(caught.value)
    assert "to ImageClassification as an object" in str(caught.value)
    # what the message says works
    node, make, _ = CHANGES[change]
    changed = ImageClassification(module.model, **SIZES)
    if change != "another head":
        fit(changed, tmp_path)
        again = ImageClassification.load_from_checkpoint(tmp_path / "one.ckpt", model=module.model)
        assert again.model is module.model


def test_a_class_that_makes_the_change_itself_is_trained_and_loaded(tmp_path):
    module = Inserts(CNN, **SIZES)
    fit(module, tmp_path)
    again = Inserts.load_from_checkpoint(tmp_path / "one.ckpt")
    assert again.state_dict().keys() == module.state_dict().keys()
