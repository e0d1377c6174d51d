"""Dual attention: the sum of spatial and channel attention."""

from attnkit.core.arguments import at_least
from attnkit.core.scores.kinds import Score
from attnkit.layers.maps.channel import ChannelAttention
from attnkit.layers.maps.combined import Combined
from attnkit.layers.maps.spatial import SpatialAttention


class DualAttention(Combined):
    """DANet's two attentions, added (Fu et al., Dual Attention Network for Segmentation, 2019).

        y = (x + γ_p · position(x)) + (x + γ_c · channel(x))

    with `position` a `SpatialAttention` and `channel` a `ChannelAttention`, both applied to x; each
    γ is learned and starts at 0. Feature maps [batch, channels, height, width] in and out; the
    children are `position` and `channel`. The input counts twice, as in the paper. The paper's
    convolutions around each attention and after the sum are left out.

    Args:
        channels: channels of the feature map.
        reduction: divisor of `channels` that gives the channels of position's queries and keys,
            rounded down, at least 1.
        score: score of both attentions; the paper's is the product, "dot", which grows with the
            map.
        backend: the kernel, as in `attnkit.attend`.
    """

    def __init__(
        self,
        channels: int,
        *,
        reduction: int = 8,
        score: str | Score = "dot",
        backend: str = "auto",
    ) -> None:
        at_least(1, reduction=reduction)
        position = SpatialAttention(
            channels,
            inner_channels=max(1, channels // reduction),
            value_channels=channels,
            score=score,
            backend=backend,
        )
        channel = ChannelAttention(channels, score=score, backend=backend)
        super().__init__(position, channel, mode="sum", names=("position", "channel"))
