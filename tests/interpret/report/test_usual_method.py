"""The method of whoever asks for none."""

import pytest
import torch
from torch import nn

import attnkit
from attnkit.interpret.report import Report
from attnkit.lightning import Explained
from attnkit.models.captioning.word_decoder import END

torch.manual_seed(0)  # of some weights relevance sees nothing


def captioner(decoder):
    encoder = attnkit.ViTEncoder((16, 16), 3, dim=16, depth=1, num_heads=2, patch_size=4)
    return attnkit.Captioner(encoder, decoder(17, 7, dim=16)).eval()


def network(attention):
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    return nn.Sequential(nn.Conv2d(3, 6, 3), attention, nn.ReLU(), *head).eval()


MODELS = {
    "vit": (
        attnkit.ViT(image_size=16, patch_size=4, num_classes=5, dim=12, depth=1, num_heads=3),
        "relevance",
    ),
    "spatial": (network(attnkit.SpatialAttention(6, residual=None)), "relevance"),
    "spatial as identity": (network(attnkit.SpatialAttention(6)), "input_gradient"),
    "channel": (network(attnkit.ChannelAttention(6)), "grad_cam"),
    "none": (network(nn.Identity()), "grad_cam"),
    "transformer": (captioner(attnkit.TransformerDecoder), "relevance"),
    "lstm": (captioner(attnkit.RecurrentDecoder), "attention"),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_serves_the_model(name, tmp_path):
    torch.manual_seed(0)
    model, method = MODELS[name]
    images, given = torch.rand(2, 3, 16, 16), {}
    if isinstance(model, attnkit.Captioner):
        given = {"sentences": torch.tensor([[5, END]] * 2), "words": [["a", "<end>"]] * 2}
    explained = Explained(model.eval(), images, pictures=images, **given)
    report = Report(trust="none")
    found = report(explained, tmp_path)
    assert {row["map"] for row in found.rows} == {method}
    if method != "relevance":
        with pytest.raises(
            (ValueError, RuntimeError), match=r"relevance|no attention|do not depend"
        ):
            Report("relevance", trust="none")(explained, tmp_path)


def test_a_report_chooses_for_each_model_again(tmp_path):
    report, images = Report(trust="none"), torch.rand(1, 3, 16, 16)
    for name in ("none", "vit"):
        model, method = MODELS[name]
        report(Explained(model.eval(), images, pictures=images), tmp_path)
        assert report.methods == [method]
