"""Channel attention: the channels of a feature map look at each other."""

from typing import Annotated, Any

from torch import Tensor, nn

from attnkit.core.arguments import at_least, divides, share
from attnkit.core.attend import attend
from attnkit.core.kernels.choose import named_backend
from attnkit.core.scores.kinds import Score, as_score
from attnkit.core.scores.learned import CosineScore, learned_score
from attnkit.core.weights import Indices, attention_weights
from attnkit.layers.maps import Combined, Maps, Residual, ResidualKind, check_features
from attnkit.layers.spatial import SpatialAttention


class _OverChannels(nn.Module):
    """Base class of attention whose tokens are channels.

    Subclasses define `project` and `score`, and may set `out_proj`.
    """

    is_over_channels = True
    score: Score | nn.Module

    def __init__(
        self, channels: int, residual: ResidualKind | None, dropout_p: float, backend: str
    ) -> None:
        super().__init__()
        at_least(1, channels=channels)
        share(dropout_p=dropout_p)
        named_backend(backend)
        self.channels = channels
        self.dropout_p = dropout_p
        self.backend = backend
        self.residual = Residual(residual)
        self.out_proj: nn.Module = nn.Identity()

    def project(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, each [batch, heads, channels / heads, height · width]."""
        raise NotImplementedError

    def forward(self, features: Maps) -> Maps:
        query, key, value = self.project(features)
        output = attend(
            query,
            key,
            value,
            score=self._score_now(),
            dropout_p=self.dropout_p if self.training else 0.0,
            backend=self.backend,
        )
        # heads are consecutive channels, and pixels are ordered row by row
        output = output.flatten(1, 2).unflatten(2, features.shape[2:])
        return self.residual(features, self.out_proj(output))

    def attention_weights(
        self, features: Maps, *, rows: Indices = None, heads: Indices = None
    ) -> Annotated[Tensor, "batch chosen_heads rows head_channels"]:
        """Return the weights that `forward` uses on the same features, before dropout.

        Returns:
            [batch, len(heads), len(rows), channels / heads]: row c of head h holds the weights of
            channel h · channels / heads + c on the channels of its head.
        """
        query, key, _ = self.project(features)
        return attention_weights(query, key, score=self._score_now(), rows=rows, heads=heads)

    def _score_now(self) -> Any:
        return self.score() if isinstance(self.score, nn.Module) else self.score


class ChannelAttention(_OverChannels):
    """Channel attention without projections (DANet, Fu et al., Dual Attention Network for Scene
    Segmentation, 2019).

        y_c = x_c + γ · Σ_d softmax_d(score(x_c, x_d)) x_d,   x_c [height · width]

    Each channel looks at all channels. This is spatial attention on the transposed map, without
    projections. Feature maps [batch, channels, height, width] of any size in and out.

    Cost for N pixels and C channels: 2 N C² multiply-adds an item, one parameter, γ.

    The default is the paper's score x_c · x_d. It grows with the map, so that nearly all weight
    falls on one channel, most often the channel itself; `score="scaled_dot"` divides it by √N, and
    `attnkit.Cosine(temperature)` ignores the norm of the channels. The authors' code has
    max_d(x_c · x_d) − x_c · x_d, with the opposite sign, so that a channel takes most from the
    channels that resemble it least; they report that it trains better, without an explanation. It
    is `score=attnkit.ScaledDot(-1.0)`.

    `attnkit.capture_attention` gives the weights, [batch, 1, channels, channels].

    Args:
        channels: channels of the feature map.
        score: a name or a `Score` without tensors, as in `attnkit.attend`.
        residual, dropout_p, backend: as in `SpatialAttention`.

    Raises:
        ValueError: a score that would need parameters, an option or features that do not fit.
    """

    def __init__(
        self,
        channels: int,
        *,
        score: str | Score = "dot",
        residual: ResidualKind | None = "gamma",
        dropout_p: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__(channels, residual, dropout_p, backend)
        self.score = learned_score(as_score(score), 1, 1)

    def project(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check_features(features, self.channels)
        maps = features.flatten(2)[:, None]
        return maps, maps, maps

    def extra_repr(self) -> str:
        return f"{self.channels}, score={self.score}"


class CrossCovarianceAttention(_OverChannels):
    """Cross-covariance attention, XCA (El-Nouby et al., XCiT, 2021).

        y = x + γ · W_out [head_1 … head_H]
        head_h,c = Σ_d softmax_d(cos(q_h,c , k_h,d) / temperature_h) v_h,d,   q, k, v = W x

    The tokens are the channels of a head, each a map of height · width values; W and W_out mix the
    channels of a pixel. The cost is linear in the pixels. Feature maps
    [batch, channels, height, width] of any size in and out.

    Cost for N pixels, C channels and H heads, in multiply-adds of one item: 2 N C² / H for the
    attention and 4 N C² for the projections; parameters 4 C² + H, with biases 4 C more, and γ.

    Differences from the paper: its factor τ on the cosine is 1 / temperature here, and the
    temperature, exp(log_temperature), is always positive; both start at 1. The paper's block
    normalizes before the layer and adds the residual with a scale for each channel;
    `residual=None` gives its layer alone.

    `attnkit.capture_attention` gives the weights, [batch, heads, channels / heads,
    channels / heads].

    Args:
        channels: channels of the feature map.
        num_heads: groups of channels that look at each other, a divisor of `channels`.
        bias: whether the projection to queries, keys and values adds a bias.
        out_bias: whether the output projection adds a bias.
        residual, dropout_p, backend: as in `SpatialAttention`.

    Raises:
        ValueError: sizes that do not divide or are not positive, features of another shape.
    """

    def __init__(
        self,
        channels: int,
        *,
        num_heads: int = 8,
        bias: bool = False,
        out_bias: bool = True,
        residual: ResidualKind | None = "gamma",
        dropout_p: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__(channels, residual, dropout_p, backend)
        divides("num_heads", num_heads, channels=channels)
        self.num_heads = num_heads
        self.in_proj: nn.Module = nn.Conv2d(channels, 3 * channels, 1, bias=bias)
        self.out_proj = nn.Conv2d(channels, channels, 1, bias=out_bias)
        self.score = CosineScore(num_heads, 0, initial_temperature=1.0)

    def project(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check_features(features, self.channels)
        maps = self.in_proj(features).flatten(2).unflatten(1, (3, self.num_heads, -1))
        query, key, value = maps.unbind(1)
        return query, key, value

    def extra_repr(self) -> str:
        return f"{self.channels}, num_heads={self.num_heads}"


class TransposedAttention(CrossCovarianceAttention):
    """Multi-Dconv head transposed attention (Zamir et al., Restormer, 2022).

    `CrossCovarianceAttention` whose queries, keys and values also depend on neighbouring pixels:

        q, k, v = depthwise_3×3(W x)

    without biases, with zero padding.

    Cost for N pixels and C channels: that of `CrossCovarianceAttention`, plus 27 N C multiply-adds
    and 27 C parameters for the convolution. The differences from the paper are those of
    `CrossCovarianceAttention`.

    Args:
        channels, num_heads, residual, dropout_p, backend: as in `CrossCovarianceAttention`; the
            paper has 1, 2, 4 and 8 heads of 48 channels.
        bias: whether the three convolutions add a bias.
    """

    def __init__(
        self,
        channels: int,
        *,
        num_heads: int = 1,
        bias: bool = False,
        residual: ResidualKind | None = "gamma",
        dropout_p: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            channels,
            num_heads=num_heads,
            bias=bias,
            out_bias=bias,
            residual=residual,
            dropout_p=dropout_p,
            backend=backend,
        )
        width = 3 * channels
        depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=bias)
        self.in_proj = nn.Sequential(self.in_proj, depthwise)


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
