"""What timm's users do next with a network whose attention was inserted or replaced: merge its
layers, give it another head, another input size. Each is right, or refused before it is wrong."""

import copy
import warnings

import pytest
import timm
import torch
from timm.models import reparameterize_model

from attnkit import insert_attention, remove_attention, replace_attention

QUICK = ["mobileone_s0", "test_resnet"]
INSERTED = [
    *QUICK,
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "fastvit_t8", "repvit_m0_9", "repghostnet_050", "repvgg_a0", "iformer_t", "shvit_s1",
            "ghostnetv3_050", "tiny_vit_5m_224", "efficientvit_m0", "nextvit_small",
            "convnext_atto",
        )
    ),
]  # fmt: skip


def network(name):
    """With running statistics of random images, which merging folds into the weights."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5)
    if name == "mobileone_s0":
        for stage in model.stages:
            del stage[2:]
    size = 64 if name in QUICK else model.pretrained_cfg["input_size"][-1]
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        model.train()(images)
    return model.eval(), images


def merging_is_right_or_refused(model, images):
    with torch.no_grad():
        expected = model(images)
        try:
            merged = reparameterize_model(model).eval()
        except RuntimeError as error:
            if "inserted attention" in str(error) and "reparameterize_model first" in str(error):
                return "refused"
            raise
        torch.testing.assert_close(merged(images), expected, rtol=1e-3, atol=1e-4)
    return "right"


@pytest.mark.parametrize("where", ["blocks", "stages"])
@pytest.mark.parametrize("name", INSERTED)
def test_layers_are_merged_after_attention_was_inserted(name, where):
    model, images = network(name)
    plain = copy.deepcopy(model)
    try:
        insert_attention(model, "cbam", where, example=images[:1])
    except ValueError:
        assert where == "blocks"
        assert name == "repvgg_a0"  # all of whose branches are merged, and add no map
        return
    result = merging_is_right_or_refused(model, images)
    if name == "mobileone_s0":
        assert result == "right"
    # without the attention layers are merged as before
    remove_attention(model)
    assert merging_is_right_or_refused(model, images) == "right"
    with torch.no_grad():
        assert torch.equal(model(images), plain(images))


def test_attention_inside_what_is_merged_is_refused():
    model, images = network("mobileone_s0")
    insert_attention(model, "se", "stages.0.1.conv_kxk.0", example=images[:1])
    assert merging_is_right_or_refused(model, images) == "refused"
    copied = copy.deepcopy(model)
    remove_attention(copied)
    assert merging_is_right_or_refused(copied, images) == "right"
    assert merging_is_right_or_refused(model, images) == "refused"


@pytest.mark.parametrize("change", ["insert", "replace"])
def test_another_head_and_another_input_size(change):
    """As if the network had been made so: features as before, logits of the new classes."""
    torch.manual_seed(0)
    name = "test_resnet" if change == "insert" else "test_vit"
    model = timm.create_model(name, num_classes=5).eval()
    images = torch.randn(2, 3, 160, 160)
    plain = copy.deepcopy(model)
    if change == "insert":
        insert_attention(model, "se", start_as_identity=True, example=images[:1])
    else:
        replace_attention(model)
    for network in (model, plain):
        network.reset_classifier(3)
        torch.manual_seed(1)
        network.get_classifier().reset_parameters()
        if hasattr(network, "set_input_size"):
            network.set_input_size(img_size=(96, 128))
    images = torch.randn(2, 3, 96, 128)
    with torch.no_grad():
        logits, expected = model(images), plain(images)
    assert logits.shape == (2, 3)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert merging_is_right_or_refused(model, images) == "right"
