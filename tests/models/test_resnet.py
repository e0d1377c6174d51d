import pytest
import timm
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock
from torchvision.models.resnet import ResNet as TorchvisionResNet

from attnkit.models.backbones import timm_backbone
from attnkit.models.resnet import ResNet


def test_it_is_torchvisions_with_another_stem():
    """Weights copied into torchvision's, whose stem and last stage are made to do nothing."""
    torch.manual_seed(0)
    ours = ResNet(3, 7, num_blocks=2, widths=(64, 128, 256)).eval()
    theirs = TorchvisionResNet(BasicBlock, [2, 2, 2, 2], num_classes=7).eval()
    for module in ours.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
    theirs.conv1, theirs.bn1, theirs.maxpool, theirs.layer4 = (
        ours.stem[0], ours.stem[1], nn.Identity(), nn.Identity(),
    )  # fmt: skip
    theirs.fc = ours.head
    for number, stage in enumerate(ours.stages, 1):
        getattr(theirs, f"layer{number}").load_state_dict(stage.state_dict())
    images = torch.randn(2, 3, 13, 11)
    torch.testing.assert_close(ours(images), theirs(images))


def test_resnet_20_has_the_published_size():
    model = ResNet(3, 10)
    parameters = sum(p.numel() for p in model.parameters())
    assert round(parameters / 1e6, 2) == 0.27
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len([c for c in convolutions if c.kernel_size == (3, 3)]) == 19


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "num_blocks: expected at least 1, got 0"),
        ({"widths": ()}, "widths: expected positive channels"),
        ({"widths": (8, 0)}, "widths: expected positive channels"),
    ],
)
def test_wrong_sizes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ResNet(3, 10, **options)


def test_timms_by_name():
    torch.manual_seed(0)
    ours = timm_backbone("resnet10t", in_channels=1, num_classes=5).eval()
    torch.manual_seed(0)
    theirs = timm.create_model("resnet10t", in_chans=1, num_classes=5).eval()
    images = torch.randn(2, 1, 32, 32)
    assert torch.equal(ours(images), theirs(images))


@pytest.mark.parametrize("name", ["resnet19", "hf-hub:someone/model", "local-dir:/tmp", ""])
def test_only_names_of_the_registry(name):
    with pytest.raises(ValueError, match="name: expected a name of timm's registry"):
        timm_backbone(name, in_channels=3, num_classes=5)


def test_weights_that_cannot_be_had(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no network\nand more")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(ValueError, match="the weights of resnet18 cannot be had: no network"):
        timm_backbone("resnet18", in_channels=3, num_classes=5, pretrained=True)
