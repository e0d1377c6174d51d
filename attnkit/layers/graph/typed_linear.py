"""A linear layer for each node type."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from attnkit.core.arguments import at_least
from attnkit.core.operators.sparse import products_of
from attnkit.core.projections import reset_linear


def channels_by_type(in_channels: int | Mapping[str, int], node_types: list[str]) -> dict[str, int]:
    """The channels of each node type, of one number for all or a dict."""
    if isinstance(in_channels, int):
        return dict.fromkeys(node_types, in_channels)
    if set(in_channels) != set(node_types):
        raise ValueError(
            f"in_channels: expected a number for each of {', '.join(map(repr, node_types))}, "
            f"got {dict(in_channels)}"
        )
    return {name: in_channels[name] for name in node_types}


class TypedLinear(nn.Module):
    """y_i = W_t x_i + b_t for a node i of type t.

    in_channels: by node type; −1: those of the type's first input.
    """

    def __init__(self, in_channels: dict[str, int], out_channels: int) -> None:
        super().__init__()
        known = [size for size in in_channels.values() if size != -1]
        at_least(1, in_channels=min(known, default=1), out_channels=out_channels)
        self.types = [*in_channels]
        layers = [nn.Linear(max(size, 1), out_channels) for size in in_channels.values()]
        for layer, size in zip(layers, in_channels.values(), strict=True):
            if size == -1:
                layer.weight = nn.UninitializedParameter()
        self.layers = nn.ModuleList(layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform matrices, biases 0."""
        for layer in self.layers:
            if isinstance(layer, nn.Linear) and not is_lazy(layer.weight):
                reset_linear(layer)

    def forward(self, x_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Nodes [nodes, channels] by type; types may lack."""
        outputs = {}
        for name, layer in zip(self.types, self.layers, strict=True):
            if name not in x_dict:
                continue
            channels = x_dict[name].shape[1]
            if isinstance(layer, nn.Linear) and is_lazy(layer.weight):
                layer.weight.materialize((layer.out_features, channels))
                layer.in_features = channels
                reset_linear(layer)
            expected = getattr(layer, "in_features", channels)  # what wraps a layer may not say it
            if channels != expected:
                raise ValueError(
                    f"x_dict: expected [nodes, {expected}] of {name!r}, "
                    f"got {list(x_dict[name].shape)}"
                )
            with products_of(x_dict[name]):
                outputs[name] = layer(x_dict[name])
        return outputs
