"""A residual network for small images, into whose blocks attention can be inserted."""

from collections.abc import Sequence

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from attnkit.core.arguments import at_least


class ResNet(nn.Module):
    """The residual network for CIFAR of He et al. 2016 (section 4.2), with torchvision's blocks.

        y = relu(norm(conv3x3(images)));  y = block(y) …;  logits = W mean over pixels(y) + b
        block(x) = relu(norm(conv3x3(relu(norm(conv3x3(x))))) + shortcut(x))

    `[batch, in_channels, height, width]` in, `[batch, num_classes]` out. The first block of each
    stage but the first halves the resolution; its shortcut is a 1 × 1 convolution with a norm
    (their option B; on CIFAR they took A, which pads with zeros). `num_blocks=3, widths=(16, 32,
    64)` is their ResNet-20: 0.27 million parameters and 41 million multiply-adds on 32 × 32 pixels.

    Args:
        in_channels: channels of the images.
        num_classes: number of logits.
        num_blocks: residual blocks of each stage, two convolutions each.
        widths: channels of each stage.

    Raises:
        ValueError: sizes that are not positive.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        num_blocks: int = 3,
        widths: Sequence[int] = (16, 32, 64),
    ) -> None:
        super().__init__()
        at_least(1, in_channels=in_channels, num_classes=num_classes, num_blocks=num_blocks)
        if not widths or min(widths) < 1:
            raise ValueError(f"widths: expected positive channels of each stage, got {widths}")
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
        )
        stages = []
        channels = widths[0]
        for number, width in enumerate(widths):
            blocks = []
            for index in range(num_blocks):
                stride = 2 if number and not index else 1
                blocks.append(
                    BasicBlock(channels, width, stride, _shortcut(channels, width, stride))
                )
                channels = width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [batch, num_classes]."""
        return self.head(self.pool(self.stages(self.stem(images))).flatten(1))


def _shortcut(channels: int, width: int, stride: int) -> nn.Module | None:
    if channels == width and stride == 1:
        return None
    return nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
