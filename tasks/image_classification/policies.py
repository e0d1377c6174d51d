"""torchvision's augmentation policies on batches: each image has its own draw."""

from collections import defaultdict
from typing import Any

from torch import Tensor, nn
from torchvision.transforms import v2


class _PerImage(v2.Transform):
    """Of a policy of torchvision: what it draws for each image in turn, done to like ones at once.

    The result is that of torchvision's transform called with one image after the other. Its own
    `forward` draws, and the operations that it calls for are written down instead of done; then
    images that get the same operation with the same magnitude go through it together.
    """

    def _apply_image_or_video_transform(
        self, image: Any, transform_id: str, magnitude: float, *args: Any, **kwargs: Any
    ) -> Any:
        self._drawn.append((transform_id, magnitude))
        return image

    def forward(self, images: Tensor) -> Tensor:
        plans = []
        for image in images:
            self._drawn: list[tuple[str, float]] = []
            super().forward(image)
            plans.append(self._drawn)
        images = images.clone()
        for step in range(max(map(len, plans), default=0)):
            alike: dict[tuple[str, float], list[int]] = defaultdict(list)
            for row, plan in enumerate(plans):
                if step < len(plan) and plan[step][0] != "Identity":
                    alike[plan[step]].append(row)
            for (name, magnitude), rows in alike.items():
                images[rows] = super()._apply_image_or_video_transform(
                    images[rows],
                    name,
                    magnitude,
                    interpolation=self.interpolation,
                    fill=self._fill,
                )
        return images


class RandAugment(_PerImage, v2.RandAugment):
    """`v2.RandAugment` of each image of a batch (Cubuk et al., 2020)."""


class TrivialAugmentWide(_PerImage, v2.TrivialAugmentWide):
    """`v2.TrivialAugmentWide` of each image of a batch (Müller and Hutter, 2021)."""


class AutoAugment(_PerImage, v2.AutoAugment):
    """`v2.AutoAugment` of each image of a batch (Cubuk et al., 2019)."""


def make_policy(name: str, magnitude: int | None, num_ops: int | None) -> nn.Module:
    """One of these policies by its name; magnitude and num_ops are RandAugment's."""
    if name == "randaugment":
        return RandAugment(num_ops or 2, 9 if magnitude is None else magnitude)
    if name == "trivial":
        return TrivialAugmentWide()
    return AutoAugment()
