"""Context attention: one learned query pools all pixels, and the result is added to each."""

from typing import Annotated, Literal, get_args

import torch
from torch import Tensor, nn

from attnkit.core.arguments import choice
from attnkit.core.attend import attend
from attnkit.core.kernels.choose import named_backend
from attnkit.core.weights import Indices, attention_weights
from attnkit.layers.maps.residual import Maps, check_features, to_tokens

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
