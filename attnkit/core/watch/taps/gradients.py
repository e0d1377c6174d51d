"""Gradients of what attention gave, from one backward pass through whatever kernels ran."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnkit.core.watch.taps.call import AttentionCall
from attnkit.core.watch.taps.edge_call import EdgeCall

Call = AttentionCall | EdgeCall


def output_gradients(
    y: Tensor, calls: Sequence[Call], *, retain_graph: bool = False
) -> list[Tensor]:
    """∂y/∂O of each call, which `weight_gradient` and `propagate` take.

        with watch_attention(model) as calls:
            y = model(images)[:, 3].sum()
        gradients = output_gradients(y, calls)

    Args:
        y: one number.
        calls: those of `watch_attention`, in whose block `y` was computed.
        retain_graph: whether another backward pass follows.

    Returns:
        A gradient for each call, of its `output`, or `seen_in` of an `EdgeCall`.

    Raises:
        ValueError: `y` is not one number, or there is no gradient: the layer is named, and why.
    """
    if y.numel() != 1:
        raise ValueError(
            f"y: expected one number, such as a sum over the batch, got {list(y.shape)}"
        )
    outputs = [call.output if isinstance(call, AttentionCall) else call.seen_in for call in calls]
    for call, output in zip(calls, outputs, strict=True):
        _check_graph(call, output)
    if not y.requires_grad:
        raise ValueError(
            "y: has no gradient, expected what the model computes without torch.no_grad() or detach"
        )
    gradients = torch.autograd.grad(
        y.sum(), outputs, retain_graph=retain_graph, allow_unused=True, materialize_grads=False
    )
    for call, gradient in zip(calls, gradients, strict=True):
        if gradient is None:
            raise ValueError(
                f"the layer {call.layer!r}: y does not depend on it; it ran before a "
                "torch.no_grad() or detach, or for nothing: layers= leaves it out"
            )
    return list(gradients)


def _check_graph(call: Call, output: Tensor) -> None:
    """ValueError where the output is in no graph."""
    if output.is_inference():
        raise ValueError(
            f"the layer {call.layer!r} ran in inference mode, which has no gradients; "
            "leave torch.inference_mode()"
        )
    if output.requires_grad:
        return
    if isinstance(call, AttentionCall) and not call.is_grad_enabled:
        raise ValueError(
            f"the layer {call.layer!r} ran without gradients; leave torch.no_grad(), and "
            "checkpoint activations with use_reentrant=False"
        )
    raise ValueError(
        f"the layer {call.layer!r} has no gradients, as nothing before it requires one; if all "
        "parameters are frozen, inputs.requires_grad_() first"
    )
