import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock
from torchvision.models.resnet import ResNet as TorchvisionResNet

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
