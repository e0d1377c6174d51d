"""Spatial attention: each pixel of a feature map, or one learned query, looks at the pixels."""

from functools import lru_cache
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from attnkit.core.arguments import at_least, choice, divides
from attnkit.core.attend import attend
from attnkit.core.kernels.choose import named_backend
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.grids import Window2d
from attnkit.core.multihead import MultiHeadAttention
from attnkit.core.scores.kinds import Score
from attnkit.core.weights import Indices, attention_weights
from attnkit.layers.maps import (
    Maps,
    Residual,
    ResidualKind,
    check_features,
    to_features,
    to_tokens,
)

Pattern = Literal["full", "window", "axial", "criss_cross"]
KeyPooling = Literal["max", "average"]


class SpatialAttention(nn.Module):
    """Self-attention of the pixels of a feature map.

        y_i = x_i + γ · W_out Σ_j softmax_j(score(W_q x_i, W_k x_j)) W_v x_j

    with j over the pixels that `pattern` lets pixel i see. Feature maps [batch, channels, height,
    width] of any size in and out; pixels are numbered row by row.

    | pattern       | a pixel sees                         | keys K             |
    |---------------|--------------------------------------|--------------------|
    | "full"        | every pixel, or the pooled ones      | N, or N / pool²    |
    | "window"      | its neighbourhood, cut at the edges  | (2 radius + 1)²    |
    | "axial"       | its row, and then its column         | width + height     |
    | "criss_cross" | its row and column, in one softmax   | width + height − 1 |

    Cost for N pixels, C channels, c inner and v value channels, in multiply-adds of one item:
    N · K · (c + v) for the attention and 2 N C (c + v) for the projections; parameters
    2 (c + v) C, with biases 2 c + v + C more, and γ. (flash computes both c and v in the larger of
    them.) "axial" has two attentions, each with its parameters, projections and residual.

    Differences from the papers:

    - Non-local networks (Wang et al. 2018): this layer has heads, scales by 1/√head_dim
      (`score="dot"` is theirs), and has γ instead of a W_out or batch norm that starts at 0.
      `x + norm(layer(x))` with `residual=None` has their norm. Keys and values are pooled before
      they are projected, as in their formula; their code pools afterwards, which is the same for
      averages. A last row or column that does not fill a pool is pooled by itself; theirs is
      dropped.
    - DANet's position attention (Fu et al. 2019) has no W_out. Its sizes and score are
      `inner_channels=channels // 8, value_channels=channels, score="dot"`.
    - CCNet (Huang et al. 2019) has no W_out either, and applies one module twice,
      `layer(layer(x))`.
    - Stand-alone self-attention (Ramachandran et al. 2019) and axial attention (Ho et al. 2019)
      have relative positions, this layer has none.

    `attnkit.capture_attention` gives the weights of `attention` (and of `column_attention` for
    "axial"), [batch, heads, N, keys]. Pixel i's weights as a map are
    `weights[:, :, i].unflatten(-1, (height, width))`, or (⌈height / pool⌉, ⌈width / pool⌉). Those
    of "axial" are [batch · height, heads, width, width] and [batch · width, heads, height, height].

    Args:
        channels: channels of the feature map.
        num_heads: number of heads, a divisor of the inner and of the value channels.
        inner_channels: channels of all heads' queries, and of their keys; None: `channels`.
        value_channels: channels of all heads' values; None: `inner_channels`.
        pattern: which pixels a pixel sees, as in the table.
        radius: radius of "window", in pixels; None: 3.
        pool: with "full", the side of the squares of pixels that make one key and value.
        pooling: how pixels are pooled, "max" or "average"; None: "max".
        residual: "gamma", with γ learned and 0 at first, so that the layer starts as the identity;
            "add", with γ = 1; None, without "x_i +" and γ.
        bias: whether the projections add a bias.
        score, dropout_p, backend: as in `MultiHeadAttention`.

    Raises:
        ValueError: sizes that do not divide or are not positive, an option that the pattern does
            not read, features of another shape.
    """

    def __init__(
        self,
        channels: int,
        *,
        num_heads: int = 1,
        inner_channels: int | None = None,
        value_channels: int | None = None,
        pattern: Pattern = "full",
        radius: int | None = None,
        pool: int = 1,
        pooling: KeyPooling | None = None,
        residual: ResidualKind | None = "gamma",
        score: str | Score | nn.Module = "scaled_dot",
        bias: bool = True,
        dropout_p: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        inner_channels = channels if inner_channels is None else inner_channels
        value_channels = inner_channels if value_channels is None else value_channels
        sizes = {"inner_channels": inner_channels, "value_channels": value_channels}
        at_least(1, channels=channels, num_heads=num_heads, **sizes)
        divides("num_heads", num_heads, **sizes)
        _check_pattern(pattern, radius, pool, pooling)
        self.channels = channels
        self.pattern = pattern
        self.radius = 3 if radius is None else radius
        self.pool = pool
        self.pooling = "max" if pooling is None else pooling

        def attention() -> MultiHeadAttention:
            return MultiHeadAttention(
                channels,
                num_heads,
                head_dim=inner_channels // num_heads,
                value_head_dim=value_channels // num_heads,
                bias=bias,
                out_bias=bias,
                score=score,
                dropout_p=dropout_p,
                backend=backend,
            )

        self.attention = attention()
        self.residual = Residual(residual)
        if pattern == "axial":
            if isinstance(score, nn.Module):
                raise ValueError("score: 'axial' has two attentions, which need a module each")
            self.column_attention = attention()
            self.column_residual = Residual(residual)

    def forward(self, features: Maps) -> Maps:
        check_features(features, self.channels)
        if self.pattern == "axial":
            features = self.residual(features, _along_rows(self.attention, features))
            columns = features.transpose(2, 3)
            update = _along_rows(self.column_attention, columns).transpose(2, 3)
            return self.column_residual(features, update)
        height, width = features.shape[2:]
        tokens = to_tokens(features)
        mask: Window2d | Edges | None = None
        if self.pattern == "window":
            mask = Window2d(height, width, self.radius, self.radius)
        elif self.pattern == "criss_cross":
            mask = criss_cross_edges(height, width, features.device)
        update = self.attention(tokens, self._pooled(features), mask=mask)
        return self.residual(features, to_features(update, height, width))

    def _pooled(self, features: Tensor) -> Tensor | None:
        """Return the tokens that give keys and values; None if they are those of the queries."""
        if self.pool == 1:
            return None
        # ceil_mode: no pixel is left out, and a map smaller than the pool is one key
        pool = F.max_pool2d if self.pooling == "max" else F.avg_pool2d
        return to_tokens(pool(features, self.pool, ceil_mode=True))

    def extra_repr(self) -> str:
        extra = {"window": f", radius={self.radius}", "full": f", pool={self.pool}"}
        return f"{self.channels}, pattern={self.pattern!r}{extra.get(self.pattern, '')}"


def _along_rows(attention: MultiHeadAttention, features: Tensor) -> Tensor:
    """Apply attention within each row; rows become items of the batch."""
    rows = features.permute(0, 2, 3, 1)
    output = attention(rows.flatten(0, 1))
    return output.unflatten(0, rows.shape[:2]).permute(0, 3, 1, 2)


def criss_cross_edges(height: int, width: int, device: torch.device) -> Edges:
    """Return edges by which each pixel sees its row and its column, and itself once.

    They are height · width · (height + width − 1) edges, cached for the latest sizes, since sorting
    edges takes long.
    """
    if torch.compiler.is_compiling():  # torch.compile would ignore the lru_cache
        return torch.compiler.disable(_kept_edges)(height, width, device)
    return _kept_edges(height, width, device)


@lru_cache(maxsize=16)
def _kept_edges(height: int, width: int, device: torch.device) -> Edges:
    # real tensors, also where torch.export traces with fake ones
    with torch.inference_mode(False), _disable_current_modes():
        y, x = torch.arange(height, device=device), torch.arange(width, device=device)
        target = (y[:, None] * width + x)[..., None]
        in_row = (y[:, None] * width + x)[:, None].expand(-1, width, -1)
        others = torch.arange(height - 1, device=device)
        others = others + (others >= y[:, None])  # all rows except the pixel's own
        in_column = others[:, None] * width + x[:, None]
        source = torch.cat([in_row, in_column], dim=2)
        edge_index = torch.stack([source, target.expand_as(source)]).flatten(1)
        edges = Edges(edge_index, height * width)
        object.__setattr__(edges, "never_repeats", True)  # known here, so no sort has to check it
        return edges


def _check_pattern(pattern: str, radius: int | None, pool: int, pooling: str | None) -> None:
    choice(get_args(Pattern), pattern=pattern)
    at_least(0, radius=radius)
    at_least(1, pool=pool)
    choice((*get_args(KeyPooling), None), pooling=pooling)
    if radius is not None and pattern != "window":
        raise ValueError(f"radius: only for the pattern 'window', got {radius} with {pattern!r}")
    if pool > 1 and pattern != "full":
        raise ValueError(f"pool: only for the pattern 'full', got {pool} with {pattern!r}")
    if pooling is not None and pool == 1:
        raise ValueError(f"pooling: only with a pool above 1, got {pooling!r}")


Fusion = Literal["add", "scale"]


class ContextAttention(nn.Module):
    """Global context attention (Cao et al., GCNet, 2019).

        context = Σ_j softmax_j(w · x_j) x_j
        update = W_2 relu(norm(W_1 context))
        y_i = x_i + update, or with fusion "scale" x_i · sigmoid(update)

    This is a non-local block with a single, learned query w, so every pixel receives the same
    update. Feature maps [batch, channels, height, width] of any size in and out.

    Cost for N pixels, C channels and c = C // reduction: 2 N C + 2 C c multiply-adds an item;
    parameters C for w, 2 C c + 3 c + C for the transform.

    As in the paper, W_2 and its bias start at 0: the layer starts as the identity, or with "scale"
    as half of it. The paper adds a bias to w · x_j; it is left out here, since the softmax cancels
    it. The paper may also fuse in both ways at once, which takes two layers here. A reduction that
    leaves one channel is refused, since the layer norm of one channel is always 0.

    `attnkit.capture_attention` gives the weights, [batch, 1, 1, N]; as a map they are
    `weights.unflatten(-1, (height, width))`.

    Args:
        channels: channels of the feature map.
        reduction: divisor of `channels` that gives the hidden channels of the transform.
        fusion: how the update is applied, "add" or "scale".
        norm_eps: the epsilon of the layer norm.
        backend: the attention kernel, as in `attnkit.attend`.

    Raises:
        ValueError: a reduction that leaves fewer than two channels, an option or features that do
            not fit.
    """

    def __init__(
        self,
        channels: int,
        *,
        reduction: int = 16,
        fusion: Fusion = "add",
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if reduction < 1 or channels // reduction < 2:
            raise ValueError(
                f"reduction: expected at least 1, and at least 2 channels left of {channels}, "
                f"got {reduction}"
            )
        choice(get_args(Fusion), fusion=fusion)
        named_backend(backend)
        self.channels = channels
        self.fusion = fusion
        self.backend = backend
        self.query = nn.Parameter(torch.empty(1, channels))
        hidden = channels // reduction
        self.transform = nn.Sequential(
            nn.Linear(channels, hidden),
            nn.LayerNorm(hidden, eps=norm_eps),
            nn.ReLU(),
            nn.Linear(hidden, channels),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the query as He et al. 2015, as in GCNet's code, and the last layer with 0."""
        nn.init.kaiming_normal_(self.query)
        last = self.transform[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, features: Maps) -> Maps:
        query, tokens = self._project(features)
        context = attend(query, tokens, tokens, score="dot", backend=self.backend)
        update = self.transform(context.flatten(1))[..., None, None]
        return features + update if self.fusion == "add" else features * update.sigmoid()

    def attention_weights(
        self, features: Maps, *, rows: Indices = None, heads: Indices = None
    ) -> Annotated[Tensor, "batch chosen_heads rows height*width"]:
        """Return the context's weights on the pixels, [batch, len(heads), len(rows),
        height · width]; there is one head with one row."""
        query, tokens = self._project(features)
        return attention_weights(query, tokens, score="dot", rows=rows, heads=heads)

    def _project(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the query and the pixels as tensors with one head."""
        check_features(features, self.channels)
        tokens = to_tokens(features)[:, None]
        return self.query.expand(features.shape[0], 1, 1, -1), tokens

    def extra_repr(self) -> str:
        return f"{self.channels}, fusion={self.fusion!r}"
