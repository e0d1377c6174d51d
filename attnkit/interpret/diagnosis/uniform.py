"""A graph model whose attention is uniform: 1 / degree in the place of every weight."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from attnkit.core.capture.pyg import attention_convolutions, softmax_replaced
from attnkit.core.masks.edges import EdgeFeatures
from attnkit.layers.graph.attention import GraphAttention
from attnkit.layers.graph.heads import NodeHeads


@contextmanager
def uniform_attention(model: nn.Module) -> Iterator[None]:
    """In the block every `GraphAttention` and every convolution of torch_geometric weighs the edges
    into a node alike; what is averaged stays what it is."""
    with ExitStack() as stack:
        convolutions = list(attention_convolutions(model).values())
        stack.enter_context(softmax_replaced(convolutions, _of_zeros))
        for module in model.modules():
            if isinstance(module, GraphAttention):
                heads = module.projections
                stack.callback(heads.register_forward_hook(_without_keys).remove)
                carried = _without_key_weight(heads.edge_features)
                stack.enter_context(patch.object(heads, "edge_features", carried))
        yield


def _of_zeros(softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def uniform(src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return softmax(torch.zeros_like(src), *args, **kwargs)

    return uniform


def _without_keys(module: nn.Module, args: object, nodes: NodeHeads) -> NodeHeads:
    """Equal keys have equal scores, whatever the score."""
    return nodes._replace(key=torch.zeros_like(nodes.key))


def _without_key_weight(
    edge_features: Callable[[Tensor], EdgeFeatures],
) -> Callable[[Tensor], EdgeFeatures]:
    return lambda features: replace(edge_features(features), key_weight=None, bias=None)
