"""LeGrad and Grad-CAM against torchcam, which nothing but this test needs."""

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer, resnet18

from attnkit.interpret import explain

torchcam = pytest.importorskip("torchcam.methods")


@pytest.fixture
def vit():
    model = VisionTransformer(32, 8, 3, 3, 24, 48, num_classes=7).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def scaled(maps):
    low, high = maps.amin(dim=(1, 2), keepdim=True), maps.amax(dim=(1, 2), keepdim=True)
    return (maps - low) / (high - low)


def test_legrad(vit):
    images = torch.randn(2, 3, 32, 32)
    read = lambda tokens: vit.heads(vit.encoder.ln(tokens)[:, 0])  # noqa: E731
    with torchcam.LeGrad(vit, list(vit.encoder.layers), score_projection=read) as extractor:
        logits = vit(images)
        (theirs,) = extractor([5, 2], logits)
    ours = explain(vit, images, [5, 2], "legrad").map
    torch.testing.assert_close(scaled(ours), theirs, atol=1e-5, rtol=1e-4)


def test_grad_cam_of_a_convolutional_network():
    model = resnet18(num_classes=7).eval()
    with torch.no_grad():
        nn.init.normal_(model.fc.weight)
    images = torch.randn(2, 3, 96, 160)
    with torchcam.GradCAM(model, "layer4") as extractor:
        logits = model(images)
        (theirs,) = extractor([5, 2], logits)
    ours = explain(model, images, [5, 2], "grad_cam")
    assert "map of the module 'layer4'" in ours.notes
    assert ours.map.shape == (2, 3, 5)
    torch.testing.assert_close(scaled(ours.map), theirs, atol=1e-5, rtol=1e-4)
    named = explain(model, images, [5, 2], "grad_cam", layers="layer3.1.conv2").map
    assert named.shape == (2, 6, 10)
